// KeyDiff's score and the selection as a program for `evictionary judge --exec "node keydiff.js"`, without a package.
// docs/any_language.md is the protocol. `node keydiff.js FOLDER` checks the vectors of a folder instead.
"use strict";
const fs = require("fs");
const path = require("path");

const KINDS = { float64: Float64Array, float32: Float32Array, bool: Uint8Array };
const WORDS = { nan: NaN, inf: Infinity, "-inf": -Infinity };
const numbers = (data) => data.map((each) => WORDS[each] ?? Number(each));
const HELLO = {
  protocol: 1,
  name: "keydiff_js",
  functions: ["keydiff.score", "selection.top_k"],
  domain: { dtype: ["float64", "float32"] },
};

// A refusal: the harness takes it for the ValueError that bad input must raise.
class Refusal extends Error {}

function read(given, name, axes) {
  if (!given || !(given.data || KINDS[given.dtype])) throw new Refusal(`${name}: wanted an array of ${Object.keys(KINDS)}`);
  if (given.shape.length < axes || given.shape.includes(0)) throw new Refusal(`${name}: got shape [${given.shape}]`);
  if (given.data) return Float64Array.from(numbers(given.data));
  const bytes = fs.readFileSync(given.file);
  return new KINDS[given.dtype](bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.length));
}

function written(found, shape, dtype, file) {
  if (!file) return Array.from(found, Number);
  fs.writeFileSync(file, Buffer.from(KINDS[dtype].from(found).buffer));
  return { file, shape, dtype };
}

function unit(vector) {
  const length = Math.hypot(...vector);
  return vector.map((x) => (length > 0 ? x / length : 0));
}

function score({ keys: given }, output) {
  const keys = read(given, "keys", 2);
  if (!keys.every(Number.isFinite)) throw new Refusal("keys: got a number that is not finite");
  const [length, channels] = given.shape.slice(-2);
  const scores = [];
  for (let head = 0; head < keys.length; head += length * channels) {
    const directions = [];
    for (let t = 0; t < length; t++) directions.push(unit(Array.from(keys.subarray(head + t * channels, head + (t + 1) * channels))));
    const anchor = unit(directions[0].map((_, c) => directions.reduce((sum, each) => sum + each[c], 0) / length));
    for (const each of directions) scores.push(-each.reduce((sum, x, c) => sum + x * anchor[c], 0));
  }
  return written(scores, given.shape.slice(0, -1), given.dtype, output && output + "scores");
}

function topK({ scores: given, budget, protected: mask }, output) {
  const scores = read(given, "scores", 1);
  if (scores.some(Number.isNaN)) throw new Refusal("scores: got NaN");
  if (!Number.isInteger(budget) || budget < 0) throw new Refusal(`budget: got ${budget}, wanted 0 or more`);
  if (mask && (mask.dtype !== "bool" || String(mask.shape) !== String(given.shape))) throw new Refusal("protected: wanted bools like scores");
  const first = mask ? read(mask, "protected", 1) : new Uint8Array(scores.length);
  const length = given.shape[given.shape.length - 1];
  const kept = new Uint8Array(scores.length);
  for (let start = 0; start < scores.length; start += length) {
    const order = Array.from({ length }, (_, t) => start + t);
    if (order.filter((t) => first[t]).length > budget) throw new Refusal("protected: got more tokens than the budget");
    // Infinities have no difference, so they are compared; of equal scores the lower position stays first.
    order.sort((a, b) => first[b] - first[a] || (scores[a] < scores[b]) - (scores[a] > scores[b]));
    for (const t of order.slice(0, budget)) kept[t] = 1;
  }
  return written(kept, given.shape, "bool", output && output + "kept");
}

const FUNCTIONS = { hello: () => HELLO, "keydiff.score": score, "selection.top_k": topK };

// What is wrong with the answer to a case of the vectors, or an empty text.
function fault({ function: name, arguments: given, expected }) {
  let found;
  try {
    found = FUNCTIONS[name](given);
  } catch (error) {
    if (!(error instanceof Refusal)) throw error;
    return expected.error ? "" : `refused: ${error.message}`;
  }
  if (expected.error) return `accepted what is to be refused: ${expected.error}`;
  const { largest, mean } = expected.tolerance?.float64 ?? { largest: 0, mean: 0 };
  const errors = numbers(expected.data).map((wanted, place) => (wanted === found[place] ? 0 : Math.abs(wanted - found[place])));
  const sum = errors.reduce((total, each) => total + each, 0);
  return Math.max(0, ...errors) <= largest && sum <= mean * errors.length ? "" : `off by ${Math.max(...errors)}`;
}

if (process.argv[2]) {
  const files = fs.readdirSync(process.argv[2]).filter((each) => /-.*\.json$/.test(each));
  const cases = files.flatMap((each) => JSON.parse(fs.readFileSync(path.join(process.argv[2], each))).cases);
  const own = cases.filter((each) => FUNCTIONS[each.function]);
  const faults = own.map((each) => [each.id, fault(each)]).filter(([, told]) => told);
  for (const [id, told] of faults) console.log(`${id}: ${told}`);
  console.log(`${own.length - faults.length} of ${own.length} cases hold`);
  process.exit(faults.length || !own.length ? 1 : 0);
}

require("readline")
  .createInterface({ input: process.stdin })
  .on("line", (line) => {
    const { id, function: name, arguments: given, output } = JSON.parse(line);
    let answer;
    try {
      answer = { result: FUNCTIONS[name](given, output) };
    } catch (error) {
      if (!(error instanceof Refusal)) throw error;
      answer = { error: error.message };
    }
    process.stdout.write(JSON.stringify({ id, ...answer }) + "\n");
  });
