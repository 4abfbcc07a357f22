"""The claims: rules, texts, recordings that agree with the model, and the command, on the tiny model."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import tiny_llama
from transformers import DynamicCache, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

from evictionary.claims import expected_attention, gvote, keydiff, lagkv, momentkv, run, texts
from evictionary.claims.claim import NOT_SEEN, OTHER_MODEL, SEEN, Claim, mean_of, median_of
from evictionary.claims.recording import Lab, Recording, Scale, as_array, compressed, later_attention, read_on, record
from evictionary.cli import app as cli
from evictionary.errors import UsageError
from evictionary.reference.expected_attention_theory import correlation

SCALE = Scale(
    prompt_tokens=96,
    later_tokens=32,
    seeds=1,
    passkey_tokens=272,
    passkey_digits=16,
    passkey_depths=(0.2, 0.6),
    lag_sizes=(32, 64),
    keep_ratios=(0.25, 0.5),
    budgets=(12, 48),
    main_budget=48,
)
ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def lab(tokenizer: PreTrainedTokenizerFast) -> Lab:
    return Lab(tiny_llama(max_position_embeddings=2048), tokenizer, SCALE)


@pytest.fixture(scope="module")
def recording(lab: Lab) -> Recording:
    return record(lab, "varied")


@pytest.fixture(scope="module")
def report(lab: Lab) -> run.Report:
    return run.run(lab.model, lab.tokenizer, model_name="tiny", scale=SCALE)


def test_a_rule_decides_by_its_conditions_alone() -> None:
    claim = Claim("X-1", "", "", "", ("gain > 0", "loss <= 0.2"), ("able >= 0.5",), ("more",))
    assert claim.rule == "other model needed unless able >= 0.5; seen if gain > 0 and loss <= 0.2; otherwise not seen"
    assert claim.numbers == ["gain", "loss", "able", "more"]

    def word(gain: float, loss: float, able: float) -> str:
        return claim.verdict({name: mean_of([value], name) for name, value in (("gain", gain), ("loss", loss), ("able", able))})

    assert word(0.1, 0.2, 0.5) == SEEN
    assert word(0.0, 0.2, 0.5) == NOT_SEEN
    assert word(0.1, 0.3, 0.5) == NOT_SEEN
    assert word(0.1, 0.2, 0.4) == OTHER_MODEL


def test_numbers_carry_their_spread_and_refuse_what_is_not_finite() -> None:
    number = mean_of(np.arange(11.0).reshape(1, 11), "elevens")
    assert (number.value, number.low, number.high, number.count) == (5.0, 1.0, 9.0, 11)
    assert median_of([0, 0, 9], "skewed").value == 0
    for bad in ([], [1.0, float("nan")], [float("inf")]):
        with pytest.raises(ValueError, match="wanted finite ones"):
            mean_of(bad, "bad")


@pytest.mark.parametrize("name", run.PAPERS)
def test_every_claim_says_where_it_stands_and_reads_numbers_that_are_measured(name: str, report: run.Report) -> None:
    paper = run.PAPERS[name].PAPER
    assert re.fullmatch(r"\d{4}\.\d{5}", paper.arxiv)
    assert len({claim.id for claim in paper.claims}) == len(paper.claims)
    for claim in paper.claims:
        assert re.search(r"section|appendix", claim.source)
        assert set(claim.numbers) <= set(report.findings[name].numbers)
        assert claim.statement.endswith(".") and claim.measured.endswith(".")


def test_texts_are_drawn_from_the_seed_and_differ_in_kind(tokenizer: PreTrainedTokenizerFast) -> None:
    for kind in texts.KINDS:
        one, same, other = (texts.make(tokenizer, kind, seed=seed, tokens=300) for seed in (1, 1, 2))
        assert one.shape == (1, 300)
        assert torch.equal(one, same)
        assert not torch.equal(one, other)
    sentences = [texts.varied(random.Random(seed)) for seed in range(300)]
    assert len(set(sentences)) == 300
    problem = texts.sums(random.Random(0))
    start, more, less = (int(part) for part in re.findall(r"has (\d+) .*buys (\d+) .*away (\d+)", problem)[0])
    assert problem.endswith(f"so {start + more - less} are left.")


def test_a_recording_is_what_the_model_computed(lab: Lab, recording: Recording) -> None:
    """Queries before RoPE are W_Q times the hidden states, and the recorded attention is the model's own."""
    for layer in recording.layers:
        projected = torch.einsum("btc,hcd->bhtd", layer.hidden_states, layer.query_weight)
        torch.testing.assert_close(layer.plain_queries, projected, rtol=1e-4, atol=1e-5)
    eager = tiny_llama(max_position_embeddings=2048, attn_implementation="eager")
    with torch.no_grad():
        output = eager(recording.input_ids, output_attentions=True, output_hidden_states=True)
    for layer, weights in zip(recording.layers, output.attentions, strict=True):
        got = later_attention(recording, layer).reshape(4, recording.later, -1)
        np.testing.assert_allclose(got, as_array(weights[0, :, recording.split :]), atol=1e-5)
    half = slice(recording.split, recording.split + recording.later // 2)
    torch.testing.assert_close(recording.residual[0], output.hidden_states[1][0, half], rtol=1e-4, atol=1e-3)


def test_reading_on_from_a_whole_cache_changes_nothing(lab: Lab, recording: Recording) -> None:
    split = recording.split
    stored = [(layer.keys[:, :, :split], layer.values[:, :, :split]) for layer in recording.layers]
    whole = [torch.ones(keys.shape[:3], dtype=torch.bool) for keys, _ in stored]
    following = recording.input_ids[:, split : split + recording.later // 2]
    output = read_on(lab.model, following, compressed(stored, whole), split, output_hidden_states=True)
    torch.testing.assert_close(output.hidden_states[1][0], recording.residual[0], rtol=1e-4, atol=1e-3)


def test_a_removed_token_is_no_longer_read(lab: Lab, recording: Recording) -> None:
    split, half = recording.split, recording.split // 2
    stored = [(layer.keys[:, :, :split].clone(), layer.values[:, :, :split].clone()) for layer in recording.layers]
    kept = [torch.arange(split).expand(keys.shape[:3]) >= half for keys, _ in stored]
    before = read_on(lab.model, recording.input_ids[:, split:], compressed(stored, kept), split).logits
    for keys, values in stored:
        keys[:, :, :half] = values[:, :, :half] = 1e3
    assert torch.equal(before, read_on(lab.model, recording.input_ids[:, split:], compressed(stored, kept), split).logits)


def test_the_rope_base_has_to_be_plain(lab: Lab) -> None:
    scaled = tiny_llama(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0})
    with pytest.raises(UsageError, match="linear"):
        record(Lab(scaled, lab.tokenizer, SCALE), "varied")


def test_expected_attention_compares_methods_of_one_size(lab: Lab, recording: Recording) -> None:
    kept = expected_attention.masks(recording, recording.layers[0], 48, torch.Generator().manual_seed(0))
    assert {name: int(mask.sum(dim=-1).unique()) for name, mask in kept.items() if name != "lagkv"} == dict.fromkeys(
        [name for name in kept if name != "lagkv"], 48
    )
    assert 44 <= int(kept["lagkv"].sum(dim=-1).unique()) <= 48  # its partitions are whole
    assert all((error > 0).all() for error in expected_attention.reconstruction(lab, recording, 0.5).values())


def test_ranks_give_spearman() -> None:
    rising = np.array([1.0, 2.0, 4.0, 1000.0])
    assert correlation(expected_attention.ranks(rising), expected_attention.ranks(np.exp(rising / 100))) == pytest.approx(1)
    assert expected_attention.ranks(np.array([[3.0, 1.0, 2.0]])).tolist() == [[2, 0, 1]]


def test_keydiff_volume_by_hand() -> None:
    """Keys (1, 0), (0, 2) and (5, 5), of which the first two stay: det = 4."""
    keys = np.array([[[1.0, 0.0], [0.0, 2.0], [5.0, 5.0]]])
    assert keydiff.log_volume(keys, np.array([[True, True, False]])) == pytest.approx(np.log(4))


def test_momentkv_errors_are_zero_where_the_theory_says_so() -> None:
    """Equal evicted keys: the moments are exact. All keys orthogonal to the query: every output is a plain mean."""
    draw = np.random.default_rng(0)
    query, keys, values = draw.normal(size=(2, 3, 4)), draw.normal(size=(2, 9, 4)), draw.normal(size=(2, 9, 4))
    kept = np.ones((2, 9), dtype=bool)
    kept[:, 1:5] = False
    keys[:, 1:5] = keys[:, 1:2]
    got = momentkv.errors(query, keys, values, kept, split=7)
    np.testing.assert_allclose(got["first"], 0, atol=1e-12)
    np.testing.assert_allclose(got["direction"], 1)
    assert (got["none"] > 1e-3).all()
    np.testing.assert_allclose(momentkv.errors(0 * query, keys, values, kept, split=7)["mass"], 4 / 9)


def test_gvote_synthetic_queries_without_noise_are_the_mean_query(recording: Recording) -> None:
    layer, channels = recording.layers[0], recording.layers[0].hidden_states.shape[-1]
    got = gvote.synthetic_queries(layer, 96, 1, recording.theta, np.zeros((2, channels)))
    mean = as_array(layer.plain_queries)[0, :, gvote.SINKS : 96].mean(axis=1)
    assert got.shape == (4, 2, 8)
    np.testing.assert_allclose(np.linalg.norm(got, axis=-1), np.linalg.norm(mean, axis=-1)[:, None].repeat(2, 1), rtol=1e-4)


def test_partial_match() -> None:
    assert lagkv.partial_match(" 12 34,56.", "123456") == 1
    assert lagkv.partial_match("It is 99934", "123456") == pytest.approx(2 / 6)
    assert lagkv.partial_match("", "123456") == 0


def test_the_long_number_stands_in_the_text(tokenizer: PreTrainedTokenizerFast) -> None:
    context_ids, question_ids, answer = lagkv.make_text(tokenizer, digits=20, depth=0.5, seed=3, tokens=500)
    assert context_ids.shape == (1, 500)
    assert tokenizer.decode(context_ids[0]).count(answer) == 1
    assert len(answer) == 20
    assert answer not in tokenizer.decode(question_ids[0])


def test_answers_of_a_batch_are_the_models_own(lab: Lab) -> None:
    """Whole caches in one batch answer as `generate` does prompt by prompt."""
    prompts = lagkv._read(lab, lambda text: None)
    whole = [torch.ones(keys.shape[:3], dtype=torch.bool) for keys, _ in prompts.layers]
    one = lagkv.answers(lab, prompts, whole)
    count = SCALE.passkey_digits + lagkv.SPARE
    for index, depth in enumerate(SCALE.passkey_depths):
        context_ids, question_ids, _ = lagkv.make_text(lab.tokenizer, digits=16, depth=depth, seed=0, tokens=SCALE.passkey_tokens)
        ids = torch.cat([context_ids, question_ids], dim=1)
        wanted = lab.model.generate(
            ids, max_new_tokens=count, min_new_tokens=count, do_sample=False, past_key_values=DynamicCache()
        )
        assert one[index] == lab.tokenizer.decode(wanted[0, ids.shape[1] :])


def test_layers_of_different_lengths_read_everything_they_hold(lab: Lab) -> None:
    """The first layer whole and the second without its first half, against an explicit mask in the same model."""
    model: LlamaForCausalLM = tiny_llama(max_position_embeddings=2048)
    ids = torch.randint(3, 259, (1, 40), generator=torch.Generator().manual_seed(2))
    full = DynamicCache()
    with torch.no_grad():
        model(ids[:, :30], past_key_values=full)
        stored = [(layer.keys, layer.values) for layer in full.layers]
        kept = [torch.ones(1, 2, 30, dtype=torch.bool), torch.arange(30).expand(1, 2, 30) >= 15]
        cache = compressed(stored, kept)
        got = [read_on(model, ids[:, place : place + 1], cache, place).logits[0, 0] for place in range(30, 40)]

        def hide(module: torch.nn.Module, arguments: tuple[object, ...], named: dict[str, torch.Tensor]) -> object:
            visible = torch.ones(10, 40, dtype=torch.bool).tril(30)
            visible[:, :15] = False
            named["attention_mask"] = visible[None, None]
            return arguments, named

        handle = model.model.layers[1].self_attn.register_forward_pre_hook(hide, with_kwargs=True)  # type: ignore[arg-type]
        wanted = model(ids[:, 30:], past_key_values=full).logits[0]
        handle.remove()
    torch.testing.assert_close(torch.stack(got), wanted, rtol=1e-4, atol=1e-4)


def test_a_run_is_the_same_again(lab: Lab, report: run.Report) -> None:
    again = run.run(lab.model, lab.tokenizer, model_name="tiny", papers=["keydiff", "gvote"], scale=SCALE)
    for name, findings in again.findings.items():
        assert findings.numbers == report.findings[name].numbers


def test_what_is_written(report: run.Report, tmp_path: Path) -> None:
    written = run.write(report.as_json(), tmp_path / "deep" / "claims")
    folder = tmp_path / "deep" / "claims"
    assert sorted(folder.iterdir()) == sorted(written)
    result = json.loads((folder / "results.json").read_text())
    assert result["schema_version"] == run.SCHEMA_VERSION
    assert [paper["paper"] for paper in result["papers"]] == list(run.PAPERS)
    page = (folder / "claims.html").read_text()
    assert (folder / "index.md").read_text().count("](keydiff.md)") == len(keydiff.PAPER.claims)
    assert not re.findall(r"https?://", page)
    for paper in result["papers"]:
        picture = folder / paper["picture"]
        assert picture.read_bytes().startswith(b"\x89PNG")
        assert picture.stat().st_size < 150_000
        text = (folder / f"{paper['paper']}.md").read_text()
        for claim in paper["claims"]:
            assert f"## {claim['id']}: {claim['verdict']}\n" in text
            assert claim["verdict"] in (SEEN, NOT_SEEN, OTHER_MODEL)
            assert claim["rule"] in page.replace("&gt;", ">").replace("&lt;", "<")
            assert all(number["low"] <= number["high"] and number["count"] for number in claim["numbers"].values())
            rows = re.findall(r"^\|.*\|$", text, re.MULTILINE)
            assert all(len(re.findall(r"(?<!\\)\|", row)) == 6 for row in rows)


def test_the_stored_results_follow_from_their_rules() -> None:
    """docs/claims holds a real run: every verdict is what today's rule makes of the stored numbers."""
    result = json.loads((ROOT / "docs" / "claims" / "results.json").read_text())
    assert (result["schema_version"], result["weights"]) == (run.SCHEMA_VERSION, "SmolLM2-135M-Instruct")
    assert [paper["paper"] for paper in result["papers"]] == list(run.PAPERS)
    for paper in result["papers"]:
        for claim, stored in zip(run.PAPERS[paper["paper"]].PAPER.claims, paper["claims"], strict=True):
            numbers = {name: mean_of([number["value"]], name) for name, number in stored["numbers"].items()}
            assert (claim.id, claim.rule, claim.statement, claim.measured) == tuple(
                stored[key] for key in ("id", "rule", "statement", "measured")
            )
            assert claim.verdict(numbers) == stored["verdict"]


@pytest.mark.slow
def test_the_command(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evictionary.claims.run.Scale", lambda: SCALE)
    common = ["--model", model_folder, "--papers", "keydiff,momentkv", "--output", tmp_path / "claims"]
    done = CliRunner().invoke(cli.app, ["claims", *map(str, common), "--json"])
    assert done.exit_code == 0, done.output
    got = json.loads(done.stdout)
    assert [paper["paper"] for paper in got["papers"]] == ["keydiff", "momentkv"]
    assert "--papers keydiff,momentkv" in got["command"]
    assert (tmp_path / "claims" / "momentkv.png").is_file()
    printed = CliRunner().invoke(cli.app, ["claims", *map(str, common)])
    assert "KD-7" in printed.stdout and "MK-36" in printed.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--papers", "keydif"], "papers: got keydif, wanted some of expected_attention"),
        (["--model", "./no/such/model"], "model: got './no/such/model'"),
        (["--output", "FILE"], "--output: got"),
        (["--output", "/proc/none"], "--output: got /proc/none, wanted a folder that can be written"),
        (["--papers", ","], "--papers: got ',', wanted at least one name"),
    ],
)
def test_bad_arguments_exit_with_2(model_folder: Path, tmp_path: Path, arguments: list[str], message: str) -> None:
    file = tmp_path / "file"
    file.touch()
    given = {"--model": str(model_folder), "--output": str(tmp_path / "out"), arguments[0]: arguments[1].replace("FILE", f"{file}")}
    done = CliRunner().invoke(cli.app, ["claims", *(part for pair in given.items() for part in pair)])
    assert done.exit_code == 2, done.output
    assert message in " ".join(done.stderr.split())
    assert not (tmp_path / "out").exists()
