// The search takes each word of a question for the beginning of a word: "how do I" would find Isolation. So `terms` leaves out the words
// that say nothing, and writes a word that no page has as the pages do. tests/site/questions.toml has what readers ask.
const EMPTY = new Set(
  (
    "a an the of to for with without in on at by from as and or but not no so then than if be is are was were been do does did done " +
    "can could should would will may might must have has had how what which who whose when where why i me my mine you your we our us " +
    "it its he she they them their this that these those there here use used using get got want need please about any some"
  ).split(" "),
);
const SAME = {
  apple: "mac", bf16: "bfloat16", bibtex: "cite", citation: "cite", citing: "cite", failed: "fail", failing: "fail", fp16: "float16",
  fp32: "float32", fp8: "float8", gqa: "grouped gqa", licensing: "licence", license: "licence", licensed: "licence", macbook: "mac", macos: "mac",
  mps: "mac", nats: "glossary", pip: "install", pytest: "test", quantisation: "quantiz", quantise: "quantiz", quantised: "quantiz",
  quantization: "quantiz", quantize: "quantiz", quantized: "quantiz", setup: "install", testing: "test",
};
const ID = /^([a-z]\w{1,3})-([a-z]?\d+[a-z]?|[a-z])$/;

function terms(question) {
  if (/["+~^*:]/.test(question)) return question; // the reader writes in the language of the search
  const words = question.toLowerCase().replace(/[?!.]+(?=\s|$)/g, "").split(/\s+/);
  const kept = words.filter((word) => word && !EMPTY.has(word) && !/^[a-z]$/.test(word));
  // A word without its s finds more. Both halves of an id have to be there: the 8 of KD-8 is also the number of a lesson.
  const search = (word) => SAME[word] ?? word.replace(/(?<=\w{2}[^s])s$/, "").replace(ID, "+$1 +$2");
  return kept.map(search).join(" ") || question;
}

if (typeof Worker !== "undefined") {
  const QUERY = 2; // the kind of a message of the theme's search that asks
  const send = Worker.prototype.postMessage;
  Worker.prototype.postMessage = function (message, ...others) {
    const asks = message?.type === QUERY && typeof message.data === "string"; // another builder's search asks in another way
    return send.call(this, asks ? { ...message, data: terms(message.data) } : message, ...others);
  };
}
