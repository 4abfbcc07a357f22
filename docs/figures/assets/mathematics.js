// The mathematics of the interactive figures: functions of reference/ for one head, with vectors as arrays of numbers. A test compares
// them with reference/ on random inputs.
"use strict";

globalThis.evictionary = globalThis.evictionary ?? {};

evictionary.mathematics = (() => {
  const sum = (numbers) => numbers.reduce((total, number) => total + number, 0);
  const dot = (a, b) => sum(a.map((entry, channel) => entry * b[channel]));
  const times = (factor, a) => a.map((entry) => factor * entry);
  const add = (a, b) => a.map((entry, channel) => entry + b[channel]);
  const distance = (a, b) => Math.hypot(...a.map((entry, channel) => entry - b[channel]));
  const total = (vectors) => vectors.reduce(add);
  const mean = (vectors) => times(1 / vectors.length, total(vectors));
  const outer = (a, b) => a.map((entry) => times(entry, b));
  const apply = (matrix, a) => matrix.map((row) => dot(row, a));

  // The softmax is taken in the log domain, so that large logits do not overflow.
  function logSumExp(logits) {
    const top = Math.max(...logits);
    return top === -Infinity ? top : top + Math.log(sum(logits.map((logit) => Math.exp(logit - top))));
  }

  function softmax(logits) {
    const normaliser = logSumExp(logits);
    return logits.map((logit) => Math.exp(logit - normaliser));
  }

  // The positions of the highest scores; of equal ones the lower position is kept (SEL-2 to SEL-4).
  function topK(scores, budget) {
    const order = scores.map((_, index) => index).sort((i, j) => scores[j] - scores[i] || i - j);
    const chosen = new Set(order.slice(0, budget));
    return scores.map((_, index) => chosen.has(index));
  }

  // KeyDiff

  function unit(vector) {
    const length = Math.hypot(...vector);
    return length === 0 ? vector : times(1 / length, vector);
  }

  const anchor = (keys) => mean(keys.map(unit));

  function keydiffScore(keys) {
    const direction = unit(anchor(keys));
    return keys.map((key) => -dot(unit(key), direction));
  }

  // LagKV

  // The smallest and the largest number of each channel of the next partition.
  function range(nextStates) {
    const channels = nextStates[0].map((_, channel) => nextStates.map((state) => state[channel]));
    return { low: channels.map((numbers) => Math.min(...numbers)), high: channels.map((numbers) => Math.max(...numbers)) };
  }

  function normalise(states, nextStates) {
    const { low, high } = range(nextStates);
    const scaled = (entry, channel) =>
      high[channel] === low[channel] ? 0 : (entry - low[channel]) / (high[channel] - low[channel]);
    return states.map((state) => state.map(scaled));
  }

  function deviation(vector) {
    if (vector.length === 1) return 0;
    const average = sum(vector) / vector.length;
    return Math.sqrt(sum(vector.map((entry) => (entry - average) ** 2)) / (vector.length - 1));
  }

  const variationScore = (normalised) => softmax(normalised.map(deviation));

  // MomentKV

  const logits = (query, keys) => keys.map((key) => dot(query, key) / Math.sqrt(query.length));

  // Attention over some tokens, with the logarithm of its partition function; zeros and -Infinity over none.
  function attention(query, keys, values, width) {
    const zeros = new Array(width).fill(0);
    if (keys.length === 0) return { output: zeros, logPartition: -Infinity };
    const weights = softmax(logits(query, keys));
    const output = total(values.map((value, token) => times(weights[token], value)));
    return { output, logPartition: logSumExp(logits(query, keys)) };
  }

  // The estimate of the evicted tokens' attention from their moments alone (MK-9, MK-11).
  function estimateEvicted(query, keys, values, width) {
    const count = keys.length;
    if (count === 0) return { output: new Array(width).fill(0), logPartition: -Infinity };
    const [meanKey, meanValue] = [mean(keys), mean(values)];
    const products = values.map((value, token) => outer(value, keys[token])).reduce((a, b) => a.map((row, i) => add(row, b[i])));
    const covariance = products.map((row, i) => add(row, times(-count * meanValue[i], meanKey)));
    const scale = 1 / (count * Math.sqrt(query.length));
    return {
      output: add(meanValue, times(scale, apply(covariance, query))),
      logPartition: Math.log(count) + logits(query, [meanKey])[0],
    };
  }

  function mix(first, second) {
    const [weight, other] = softmax([first.logPartition, second.logPartition]);
    return { weight, output: add(times(weight, first.output), times(other, second.output)) };
  }

  const clip = (entry, low, high) => Math.min(high, Math.max(low, entry));

  // MB-2 to MB-6: the box that holds the full output, from the moments and the range of each channel of the evicted tokens.
  function outputBox(query, keys, values, retained, estimate) {
    if (keys.length === 0) return { low: retained.output, high: retained.output };
    const [ofKeys, ofValues] = [range(keys), range(values)];
    const end = (choose) => sum(query.map((q, c) => choose(q * ofKeys.low[c], q * ofKeys.high[c]))) / Math.sqrt(query.length);
    const [least, largest] = [end(Math.min), end(Math.max)];
    const meanLogit = estimate.logPartition - Math.log(keys.length);
    const share = largest > least ? clip((meanLogit - least) / (largest - least), 0, 1) : 0;
    const chord = Math.log(keys.length) + largest + Math.log(share + (1 - share) * Math.exp(least - largest));
    const weights = [estimate.logPartition, Math.max(chord, estimate.logPartition)].map(
      (logPartition) => softmax([retained.logPartition, logPartition])[1],
    );
    const reach = Math.sinh(Math.min((largest - least) / 2, 40));
    const ends = mean(values).map((entry, c) => {
      const [low, high] = [ofValues.low[c], ofValues.high[c]];
      const average = clip(entry, low, high);
      const radius = Math.sqrt((high - average) * (average - low)) * reach;
      const [a, b] = [Math.max(low, average - radius), Math.min(high, average + radius)].map((v) => v - retained.output[c]);
      return [Math.min(...weights.map((w) => w * a)), Math.max(...weights.map((w) => w * b))];
    });
    return {
      low: add(retained.output, ends.map(([low]) => low)),
      high: add(retained.output, ends.map(([, high]) => high)),
    };
  }

  // MB-7: as much of the way to the corrected output, moved into the box, as cannot lead away from the full one.
  function certified(retained, corrected, box) {
    const [low, high] = [add(box.low, times(-1, retained)), add(box.high, times(-1, retained))];
    const step = corrected.map((entry, c) => clip(entry - retained[c], low[c], high[c]));
    const gain = sum(step.map((entry, c) => Math.min(entry * low[c], entry * high[c])));
    const length = dot(step, step);
    const scale = length > 0 ? clip((2 * gain) / length, 0, 1) : 0;
    return step.map((entry, c) => retained[c] + clip(scale * entry, low[c], high[c]));
  }

  // MK-2, MK-9, MK-12, MB-7: attention over all tokens, over the kept, over the evicted, and what the moments make of it.
  function momentkv(query, keys, values, kept) {
    const width = values[0].length;
    const part = (wanted, array) => array.filter((_, token) => kept[token] === wanted);
    const retained = attention(query, part(true, keys), part(true, values), width);
    const evicted = attention(query, part(false, keys), part(false, values), width);
    const estimate = estimateEvicted(query, part(false, keys), part(false, values), width);
    const exact = mix(retained, evicted);
    const corrected = mix(retained, estimate);
    const box = outputBox(query, part(false, keys), part(false, values), retained, estimate);
    return {
      full: exact.output,
      retained: retained.output,
      evicted: evicted.output,
      estimate: estimate.output,
      corrected: corrected.output,
      certified: certified(retained.output, corrected.output, box),
      box,
      weight: exact.weight,
      estimatedWeight: corrected.weight,
    };
  }

  // H2O and TOVA, token by token

  // Each query attends to what is kept, its own token too. Beyond the budget the token with the lowest number goes, but none of the last
  // `recent`. The number is the sum of the attention received so far (H2O), or else the weight of the last query (TOVA).
  function received(queries, keys, budget, recent, isSum) {
    const numbers = keys.map(() => 0);
    let there = [];
    return queries.map((query, step) => {
      there.push(step);
      const weights = softmax(logits(query, there.map((token) => keys[token])));
      const row = keys.map(() => null);
      there.forEach((token, place) => {
        row[token] = weights[place];
        numbers[token] = weights[place] + (isSum ? numbers[token] : 0);
      });
      const stays = topK(there.map((token) => (token > step - recent ? Infinity : numbers[token])), budget);
      const gone = there.filter((_, place) => !stays[place]);
      there = there.filter((_, place) => stays[place]);
      return { row, numbers: [...numbers], kept: [...there], gone };
    });
  }

  // AdaKV (AD-1 to AD-3): each head keeps its best floor(floor * budget) tokens, and the best of the layer fill the rest.

  function adaSelect(scores, budget, floor) {
    const length = scores[0].length;
    const own = scores.map((row) => topK(row, Math.floor(floor * budget)));
    const layer = topK(scores.flatMap((row, head) => row.map((score, token) => (own[head][token] ? Infinity : score))), scores.length * budget);
    return scores.map((_, head) => layer.slice(head * length, (head + 1) * length));
  }

  // A cache in pages (PAGE-4 to PAGE-10): for each head the token in each place, or null, and the pages that nobody needs.

  function compactPages(kept, table, size) {
    const held = kept.map((row) => row.flatMap((stays, token) => (stays ? [token] : [])));
    const needed = Math.ceil(Math.max(...held.map((tokens) => tokens.length)) / size);
    return {
      places: held.map((tokens) => Array.from({ length: table.length * size }, (_, place) => tokens[place] ?? null)),
      freed: table.slice(needed),
    };
  }

  // The same without moving a token: only a page without a kept token is free.
  function leavePages(kept, table, size) {
    const places = kept.map((row) => Array.from({ length: table.length * size }, (_, place) => (row[place] ? place : null)));
    const isEmpty = (entry) => places.every((row) => row.slice(entry * size, (entry + 1) * size).every((token) => token === null));
    return { places, freed: table.filter((_, entry) => isEmpty(entry)) };
  }

  return {
    adaSelect, anchor, compactPages, distance, keydiffScore, leavePages, logits, momentkv, normalise, range, received, softmax, topK, unit,
    variationScore,
  };
})();
