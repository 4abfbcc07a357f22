// Scores and selection as a program for `evictionary judge --exec ./keydiff`, in plain C++17 without a library:
//   c++ -std=c++17 -O2 keydiff.cpp -o keydiff
// `./keydiff KD-7.json KD-8.json` checks these vectors instead.
// docs/any_language.md is the protocol. Arrays are little-endian files without a header, as is every machine that this runs on.
#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstring>
#include <cstdint>
#include <fstream>
#include <iterator>
#include <limits>
#include <iostream>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

// As much of JSON as requests and vectors hold: objects, lists, numbers, texts, true, false, null.
struct Json {
    char kind = 'n';  // o, l, d, s, b, n
    std::map<std::string, Json> fields;
    std::vector<Json> entries;
    double number = 0;
    std::string text;
    const Json& operator[](const std::string& key) const {
        static const Json nothing;
        auto found = fields.find(key);
        return found == fields.end() ? nothing : found->second;
    }
};

struct Reader {
    const std::string& line;
    size_t at = 0;
    char next() {
        while (at < line.size() && std::isspace(static_cast<unsigned char>(line[at]))) ++at;
        return at < line.size() ? line[at] : '\0';
    }
    bool take(char wanted) { return next() == wanted ? (++at, true) : false; }
    std::string quoted() {  // an escape stands for its letter: no name that is looked for has one
        std::string found;
        for (++at; line.at(at) != '"'; ++at) found += line[at] == '\\' ? line.at(++at) : line[at];
        ++at;
        return found;
    }
    Json value() {
        Json found;
        if (take('{')) {
            for (found.kind = 'o'; !take('}'); take(',')) {
                next();
                std::string key = quoted();
                take(':');
                found.fields[key] = value();
            }
        } else if (take('[')) {
            for (found.kind = 'l'; !take(']'); take(',')) found.entries.push_back(value());
        } else if (next() == '"') {
            found.kind = 's';
            found.text = quoted();
        } else {
            size_t start = at;
            while (at < line.size() && !std::strchr(",]} \t\r\n", line[at])) ++at;
            std::string word = line.substr(start, at - start);
            found.kind = word == "null" ? 'n' : word == "true" || word == "false" ? 'b' : 'd';
            found.number = found.kind == 'd' ? std::stod(word) : word == "true";
        }
        return found;
    }
};

// A number; those that are not finite are texts.
double number(const Json& given) {
    if (given.kind == 'd' || given.kind == 'b') return given.number;
    const double infinity = std::numeric_limits<double>::infinity();
    return given.text == "inf" ? infinity : given.text == "-inf" ? -infinity : std::nan("");
}

// A refusal: the harness takes it for the ValueError that bad input must raise.
using Refusal = std::invalid_argument;

struct Array {
    std::vector<size_t> shape;
    std::string dtype;
    std::vector<double> numbers;
};

template <typename Stored>
std::vector<double> stored(std::ifstream& file, size_t count) {
    std::vector<Stored> raw(count);
    file.read(reinterpret_cast<char*>(raw.data()), count * sizeof(Stored));
    return {raw.begin(), raw.end()};
}

Array read(const Json& given, const std::string& name, size_t axes) {
    Array found;
    if (given["file"].kind != 's' && given["data"].kind != 'l') throw Refusal(name + ": wanted an array");
    size_t count = 1;
    for (const Json& size : given["shape"].entries) {
        found.shape.push_back(static_cast<size_t>(size.number));
        count *= found.shape.back();
    }
    found.dtype = given["dtype"].text;
    if (found.shape.size() < axes || count == 0) throw Refusal(name + ": wanted more axes, none of them empty");
    std::ifstream file(given["file"].text, std::ios::binary);
    if (given["data"].kind == 'l')
        for (const Json& each : given["data"].entries) found.numbers.push_back(number(each));
    else if (found.dtype == "float64") found.numbers = stored<double>(file, count);
    else if (found.dtype == "float32") found.numbers = stored<float>(file, count);
    else if (found.dtype == "int64") found.numbers = stored<int64_t>(file, count);
    else if (found.dtype == "bool") found.numbers = stored<uint8_t>(file, count);
    else throw Refusal(name + ": got dtype " + found.dtype);
    return found;
}

using Row = std::vector<double>;
Row answered;  // the numbers of the latest answer, for the vectors

template <typename Stored>
std::string written(const std::vector<double>& numbers, const std::vector<size_t>& shape, const char* dtype, const std::string& path) {
    std::vector<Stored> raw(numbers.begin(), numbers.end());
    answered = numbers;
    if (!path.empty()) std::ofstream(path, std::ios::binary).write(reinterpret_cast<const char*>(raw.data()), raw.size() * sizeof(Stored));
    std::string sizes;
    for (size_t size : shape) sizes += (sizes.empty() ? "" : ", ") + std::to_string(size);
    return "{\"file\": \"" + path + "\", \"shape\": [" + sizes + "], \"dtype\": \"" + dtype + "\"}";
}

double norm(const double* from, size_t size) {
    double largest = 0, sum = 0;
    for (size_t i = 0; i < size; ++i) largest = std::max(largest, std::abs(from[i]));
    if (largest == 0) return 0;
    for (size_t i = 0; i < size; ++i) sum += from[i] / largest * (from[i] / largest);
    return largest * std::sqrt(sum);
}

// keydiff.score: minus the cosine of each key of a head with the mean of their directions.
void keydiff(double* keys, size_t length, size_t channels, double* scores) {
    Row mean(channels, 0.0);
    for (size_t t = 0; t < length; ++t) {
        double* key = keys + t * channels;
        double size = norm(key, channels);
        for (size_t c = 0; c < channels; ++c) mean[c] += (key[c] = size > 0 ? key[c] / size : 0) / length;
    }
    double size = norm(mean.data(), channels);
    for (size_t t = 0; t < length; ++t) {
        double cosine = 0;
        for (size_t c = 0; c < channels; ++c) cosine += keys[t * channels + c] * mean[c];
        scores[t] = size > 0 ? -cosine / size : 0;
    }
}

void knorm(double* keys, size_t length, size_t channels, double* scores) {
    for (size_t t = 0; t < length; ++t) scores[t] = -norm(keys + t * channels, channels);
}

std::string score(const Json& request, void (*head)(double*, size_t, size_t, double*)) {
    Array keys = read(request["arguments"]["keys"], "keys", 2);
    for (double number : keys.numbers)
        if (!std::isfinite(number)) throw Refusal("keys: got a number that is not finite");
    size_t channels = keys.shape.back();
    keys.shape.pop_back();
    Row scores(keys.numbers.size() / channels);
    for (size_t start = 0; start < scores.size(); start += keys.shape.back())
        head(&keys.numbers[start * channels], keys.shape.back(), channels, &scores[start]);
    const std::string output = request["output"].kind == 's' ? request["output"].text + "scores" : "";
    return keys.dtype == "float64" ? written<double>(scores, keys.shape, "float64", output)
                                   : written<float>(scores, keys.shape, "float32", output);
}

// selection.top_k: the protected tokens, then the highest scores; of equal ones the lower position.
std::string top_k(const Json& request) {
    Array scores = read(request["arguments"]["scores"], "scores", 1);
    const Json& budget = request["arguments"]["budget"];
    if (budget.kind != 'd' || budget.number < 0 || budget.number != std::floor(budget.number)) throw Refusal("budget: wanted 0 or more");
    Row first(scores.numbers.size(), 0.0);
    if (request["arguments"]["protected"].kind != 'n') {
        Array given = read(request["arguments"]["protected"], "protected", 1);
        if (given.shape != scores.shape || given.dtype != "bool") throw Refusal("protected: wanted bools, one for each score");
        first = given.numbers;
    }
    size_t length = scores.shape.back(), count = static_cast<size_t>(std::min<double>(budget.number, length));
    Row kept(scores.numbers.size(), 0.0);
    for (size_t start = 0; start < kept.size(); start += length) {
        std::vector<size_t> order(length);
        size_t must = 0;
        for (size_t t = 0; t < length; ++t) {
            order[t] = start + t;
            must += first[start + t] > 0;
            if (std::isnan(scores.numbers[start + t])) throw Refusal("scores: got NaN");
        }
        if (must > budget.number) throw Refusal("protected: got more tokens than the budget");
        std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
            return first[a] != first[b] ? first[a] > first[b] : scores.numbers[a] > scores.numbers[b];
        });
        for (size_t place = 0; place < count; ++place) kept[order[place]] = 1;
    }
    return written<uint8_t>(kept, scores.shape, "bool", request["output"].kind == 's' ? request["output"].text + "kept" : "");
}

std::string answer(const Json& request) {
    const std::string& function = request["function"].text;
    if (function == "hello")
        return R"({"protocol": 1, "name": "keydiff_cpp", "functions": ["keydiff.score", "knorm.score", "selection.top_k"],)"
               R"( "domain": {"dtype": ["float64", "float32"]}})";
    if (function == "keydiff.score") return score(request, keydiff);
    if (function == "knorm.score") return score(request, knorm);
    if (function == "selection.top_k") return top_k(request);
    throw Refusal("no function " + function);
}

// Whether the answer to a case of the vectors is the expected one; a case has the fields of a request.
bool holds(const Json& one) {
    const Json &expected = one["expected"], &allowed = expected["tolerance"]["float64"];
    try {
        answer(one);
    } catch (const Refusal&) {
        return expected["error"].kind == 's';
    }
    const std::vector<Json>& wanted = expected["data"].entries;
    if (expected["error"].kind == 's' || wanted.size() != answered.size()) return false;
    double largest = 0, sum = 0;
    for (size_t i = 0; i < wanted.size(); ++i) {
        double error = number(wanted[i]) == answered[i] ? 0 : std::abs(number(wanted[i]) - answered[i]);
        if (std::isnan(error)) return false;
        largest = std::max(largest, error), sum += error;
    }
    return largest <= allowed["largest"].number && sum <= allowed["mean"].number * wanted.size();
}

int check(int count, char** files) {
    int held = 0, asked = 0;
    for (int place = 0; place < count; ++place) {
        std::ifstream file(files[place]);
        const std::string text{std::istreambuf_iterator<char>(file), {}};
        const Json content = Reader{text}.value();
        for (const Json& one : content["cases"].entries)
            for (const char* own : {"keydiff.score", "knorm.score", "selection.top_k"})
                if (one["function"].text == own) ++asked, held += holds(one);
    }
    std::cout << held << " of " << asked << " cases hold" << std::endl;
    return held == asked && asked ? 0 : 1;
}

int main(int count, char** files) {
    if (count > 1) return check(count - 1, files + 1);
    for (std::string line; std::getline(std::cin, line);) {
        Json request = Reader{line}.value();
        std::string said;
        try {
            said = "\"result\": " + answer(request);
        } catch (const Refusal& refusal) {
            said = "\"error\": \"" + std::string(refusal.what()) + "\"";
        }
        std::cout << "{\"id\": " << static_cast<long>(request["id"].number) << ", " << said << "}" << std::endl;
    }
}
