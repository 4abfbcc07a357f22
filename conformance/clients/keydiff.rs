// KeyDiff's score as a program for `evictionary judge --exec ./keydiff`, in Rust's standard library alone.
// docs/any_language.md is the protocol. rustc -O keydiff.rs; `./keydiff FOLDER` checks the vectors of a folder instead.
use std::collections::HashMap;
use std::io::{BufRead, Write};
use std::{env, fs, io, process};

const HELLO: &str = r#"{"protocol": 1, "name": "keydiff_rs", "functions": ["keydiff.score"], "domain": {"dtype": ["float64", "float32"]}}"#;

// The JSON of the protocol and of the vectors.
enum Json {
    Object(HashMap<String, Json>),
    List(Vec<Json>),
    Text(String),
    Number(f64),
    Other,
}

struct Reader<'a> {
    rest: &'a str,
}

impl Reader<'_> {
    fn skip(&mut self, what: char) -> bool {
        self.rest = self.rest.trim_start();
        match self.rest.strip_prefix(what) {
            Some(rest) => {
                self.rest = rest;
                true
            }
            None => false,
        }
    }

    fn text(&mut self) -> String {
        let mut text = String::new();
        let mut letters = self.rest.char_indices();
        while let Some((place, letter)) = letters.next() {
            match letter {
                '"' => {
                    self.rest = &self.rest[place + 1..];
                    return text;
                }
                // Paths and names have no other escapes than these.
                '\\' => text.extend(letters.next().map(|(_, escaped)| escaped)),
                _ => text.push(letter),
            }
        }
        panic!("a text without an end");
    }

    fn value(&mut self) -> Json {
        if self.skip('{') {
            let mut fields = HashMap::new();
            while !self.skip('}') {
                self.skip(',');
                assert!(self.skip('"'));
                let name = self.text();
                assert!(self.skip(':'));
                fields.insert(name, self.value());
            }
            return Json::Object(fields);
        }
        if self.skip('[') {
            let mut items = Vec::new();
            while !self.skip(']') {
                self.skip(',');
                items.push(self.value());
            }
            return Json::List(items);
        }
        if self.skip('"') {
            return Json::Text(self.text());
        }
        let end = self.rest.find([',', '}', ']']).unwrap_or(self.rest.len());
        let (word, rest) = self.rest.split_at(end); // a number, true, false or null
        self.rest = rest;
        word.trim().parse().map_or(Json::Other, Json::Number)
    }
}

impl Json {
    fn field(&self, name: &str) -> &Json {
        match self {
            Json::Object(fields) => fields.get(name).unwrap_or(&Json::Other),
            _ => &Json::Other,
        }
    }

    fn text(&self) -> &str {
        match self {
            Json::Text(text) => text,
            _ => "",
        }
    }

    fn list(&self) -> &[Json] {
        match self {
            Json::List(items) => items,
            _ => &[],
        }
    }

    // A number; those that are not finite are texts: "nan", "inf", "-inf".
    fn number(&self) -> f64 {
        match self {
            Json::Number(number) => *number,
            other => other.text().parse().unwrap_or(f64::NAN),
        }
    }

    fn numbers(&self) -> Vec<f64> {
        self.list().iter().map(Json::number).collect()
    }
}

// The direction of a vector, scaled first so that no square over- or underflows; of the zero vector, zero.
fn unit(vector: &[f64]) -> Vec<f64> {
    let largest = vector.iter().fold(0.0_f64, |most, x| most.max(x.abs()));
    let scaled: Vec<f64> = vector.iter().map(|x| if largest > 0.0 { x / largest } else { 0.0 }).collect();
    let length = scaled.iter().map(|x| x * x).sum::<f64>().sqrt();
    scaled.iter().map(|x| if length > 0.0 { x / length } else { 0.0 }).collect()
}

// Minus the cosine of each key of a head with the mean of their directions.
fn score(head: &[f64], channels: usize) -> Vec<f64> {
    let directions: Vec<Vec<f64>> = head.chunks(channels).map(unit).collect();
    let mean: Vec<f64> = (0..channels)
        .map(|channel| directions.iter().map(|each| each[channel]).sum::<f64>() / directions.len() as f64)
        .collect();
    let anchor = unit(&mean);
    directions.iter().map(|each| -each.iter().zip(&anchor).map(|(x, y)| x * y).sum::<f64>()).collect()
}

// The scores of all heads, with their shape, or why the keys are refused.
fn scores(keys: &Json) -> Result<(Vec<usize>, Vec<f64>), String> {
    let shape: Vec<usize> = keys.field("shape").numbers().iter().map(|size| *size as usize).collect();
    let dtype = keys.field("dtype").text();
    if shape.len() < 2 || shape.contains(&0) || !dtype.starts_with("float") {
        return Err(format!("keys: got shape {shape:?} and dtype {dtype}, wanted numbers [..., T, D]"));
    }
    let bytes = fs::read(keys.field("file").text()).unwrap_or_default();
    let numbers: Vec<f64> = match (keys.field("data"), dtype) {
        (Json::List(_), _) => keys.field("data").numbers(),
        (_, "float32") => bytes.chunks(4).map(|each| f32::from_le_bytes(each.try_into().unwrap()) as f64).collect(),
        _ => bytes.chunks(8).map(|each| f64::from_le_bytes(each.try_into().unwrap())).collect(),
    };
    if !numbers.iter().all(|x| x.is_finite()) {
        return Err("keys: got numbers that are not finite".to_string());
    }
    let (channels, rows) = (shape[shape.len() - 1], &shape[..shape.len() - 1]);
    let heads = numbers.chunks(rows[rows.len() - 1] * channels);
    Ok((rows.to_vec(), heads.flat_map(|head| score(head, channels)).collect()))
}

// The result of a call, or why it is refused: the judge takes that for the ValueError that bad input must raise.
fn answer(request: &Json) -> io::Result<Result<String, String>> {
    if request.field("function").text() == "hello" {
        return Ok(Ok(HELLO.to_string()));
    }
    let keys = request.field("arguments").field("keys");
    let (dtype, file) = (keys.field("dtype").text(), format!("{}scores", request.field("output").text()));
    let (shape, found) = match scores(keys) {
        Ok(found) => found,
        Err(told) => return Ok(Err(told)),
    };
    let written: Vec<u8> = if dtype == "float64" {
        found.into_iter().flat_map(f64::to_le_bytes).collect()
    } else {
        found.into_iter().flat_map(|x| (x as f32).to_le_bytes()).collect()
    };
    fs::write(&file, written)?;
    Ok(Ok(format!(r#"{{"file": "{file}", "shape": {shape:?}, "dtype": "{dtype}"}}"#)))
}

// Whether the answer to a case of the vectors is the expected one.
fn holds(case: &Json) -> bool {
    let expected = case.field("expected");
    match scores(case.field("arguments").field("keys")) {
        Err(_) => !expected.field("error").text().is_empty(),
        Ok((_, found)) => {
            let wanted = expected.field("data").numbers();
            let errors = || wanted.iter().zip(&found).map(|(one, other)| (one - other).abs());
            let allowed = expected.field("tolerance").field("float64");
            wanted.len() == found.len()
                && errors().all(|error| error <= allowed.field("largest").number())
                && errors().sum::<f64>() <= allowed.field("mean").number() * wanted.len() as f64
        }
    }
}

fn check(folder: &str) -> io::Result<bool> {
    let (mut held, mut count) = (0, 0);
    for entry in fs::read_dir(folder)? {
        let file = entry?.path();
        if !file.to_string_lossy().ends_with(".json") {
            continue;
        }
        let content = Reader { rest: &fs::read_to_string(&file)? }.value();
        for case in content.field("cases").list() {
            if case.field("function").text() == "keydiff.score" {
                count += 1;
                held += holds(case) as usize;
            }
        }
    }
    println!("{held} of {count} cases hold");
    Ok(held == count && count > 0)
}

fn main() -> io::Result<()> {
    if let Some(folder) = env::args().nth(1) {
        process::exit(if check(&folder)? { 0 } else { 1 });
    }
    for line in io::stdin().lock().lines() {
        let request = Reader { rest: &line? }.value();
        let id = match request.field("id") {
            Json::Number(id) => *id as u64,
            _ => 0,
        };
        match answer(&request)? {
            Ok(result) => println!(r#"{{"id": {id}, "result": {result}}}"#),
            Err(told) => println!(r#"{{"id": {id}, "error": "{told}"}}"#),
        }
        io::stdout().flush()?;
    }
    Ok(())
}
