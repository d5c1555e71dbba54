"""What runs answer to new texts, against the networks and tasks themselves.

The runs are never trained: what is compared are numbers that follow from their parameters.
"""

import functools
import html
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from scipy import special
from stdlib_text import stdlib_documents
from stores import make_store

from electra_jax import predict
from electra_jax.config import get_config
from electra_jax.data import layout, tokenizers
from electra_jax.data.features import encode_texts
from electra_jax.data.store import TokenStore
from electra_jax.data.tokenizers.base import encode_with_special_tokens
from electra_jax.finetune import config as finetuning
from electra_jax.jobs import pretraining
from electra_jax.objectives import make_objective
from electra_jax.objectives.base import context
from electra_jax.reporting import gallery
from electra_jax.reporting.page import texts_page
from electra_jax.run.workdir import write_run_files
from electra_jax.sharding.mesh import make_mesh
from electra_jax.training.checkpoint import Checkpoints
from electra_jax.training.optimizer import OptimizerConfig
from electra_jax.training.program import make_program
from electra_jax.training.step import TrainState

pytestmark = pytest.mark.process

TEXTS = ["The file is opened, and its lines are read.", "", "x = 5 " * 30]
MEANT = {"rain": "It rains in the city.", "sun": "The sun shines."}


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("predict")


@pytest.fixture(scope="module")
def store(place) -> TokenStore:
    documents = stdlib_documents()
    lines = [line for document in documents for line in document]
    tokenizer = tokenizers.train(
        "wordpiece", lines, 600, lower_case=True, strip_accents=True, max_word_chars=50
    )
    return make_store(place / "store", documents, tokenizer, held_out=0.2)


def save(path: Path, config, objective, tokenizer) -> TrainState:
    """A run directory with fresh parameters, at step 3; large ones, so that outputs differ."""
    params = jax.tree.map(lambda x: x * 4, objective.init(jax.random.key(7)))
    state = TrainState(jnp.int32(3), params, (jnp.zeros(1),))
    with Checkpoints(path / "checkpoints", "hash", keep=1) as checkpoints:
        checkpoints.save(3, state, {}, {})
    write_run_files(config, path, tokenizer, {})
    return state


@pytest.fixture(scope="module")
def pretrained(place, store):
    config = get_config()
    config.seed = 5
    config.data.sequence_length = 32
    config.model.update(hidden_size=32, num_layers=2, embedding_size=32, max_positions=32)
    config.generator.update(width=0.5)
    objective = make_objective(config, store.tokenizer)
    state = save(place / "pretrained", config, objective, store.tokenizer)
    return place / "pretrained", config, objective, state.params


def finetuned(path: Path, store, kind: str, **data):
    """A run directory with a head for a task whose labels are given; its task and parameters."""
    config = finetuning.get_config()
    encoder = tiny.encoder(vocab_size=store.tokenizer.vocab_size, max_positions=64)
    config.model.update(encoder.sizes())
    config.init_from = "gone"
    config.data.update(kind=kind, max_length=48, train="gone.csv", dev="gone.csv", **data)
    task = finetuning.make_task(config, lambda line: None)
    objective = finetuning.make_objective(config, task)
    params = save(path, config, objective, store.tokenizer).params
    return task, objective, params


@pytest.fixture
def run(command):
    return functools.partial(command, predict.main)


def row_of(ids: list[int], tokenizer) -> dict[str, jax.Array]:
    """A batch of one row, without padding."""
    row = jnp.array([[tokenizer.cls_id, *ids, tokenizer.sep_id]], jnp.int32)
    places = jnp.arange(row.shape[1], dtype=jnp.int32)[None]
    return {
        "input_ids": row,
        "segment_ids": jnp.ones_like(row),
        "position_ids": places,
        "token_type_ids": jnp.zeros_like(row),
    }


def answered(out: str) -> list[dict]:
    return [json.loads(line) for line in out.splitlines()]


def stream(*rows: dict) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_detection_has_the_auc_of_the_evaluation(pretrained, store, run, tmp_path):
    """The same rows, masks and samples; and the answers have the same area by ranks."""
    path, config, objective, params = pretrained
    program = make_program(
        make_mesh(config.parallel), objective, OptimizerConfig(1e-3, 1, 10), config.seed
    )
    rows = layout.rows(store, "held_out", 32, config.data.layout, seed=config.seed)
    expected = pretraining.evaluate(program, objective, params, rows, 16)
    output = tmp_path / "answers.jsonl"
    flags = [f"--workdir={path}", "--mode=detect", "--replace", f"--input={store.directory}"]
    code, out, _ = run(*flags, f"--output={output}")
    assert code == 0
    found = re.fullmatch(r"AUC (0\.\d{4}) over ([\d,]+) tokens, ([\d,]+) of them replaced\n", out)
    assert float(found[1]) == pytest.approx(expected["eval/rtd_auc"], abs=6e-5)
    judged, replaced = (int(found[i].replace(",", "")) for i in (2, 3))
    assert judged == rows.real_tokens
    assert replaced / judged == pytest.approx(expected["eval/replaced_fraction"], abs=1e-6)
    tokens = [t for answer in answered(output.read_text()) for t in answer["tokens"]]
    assert sum(t["token"] != t.get("original", t["token"]) for t in tokens) == replaced
    asked = [t for t in tokens if "original" in t]
    right = sum(t["proposals"][0][0] == t["original"] for t in asked) / len(asked)
    assert right == pytest.approx(expected["eval/mlm_accuracy"], abs=1e-6)


def test_detection_has_every_token_of_a_text_at_its_place(pretrained, store, run, tmp_path):
    path, _, objective, params = pretrained
    (tmp_path / "in.txt").write_text("\n".join(TEXTS))
    flags = [f"--workdir={path}", "--mode=detect", f"--input={tmp_path / 'in.txt'}"]
    code, out, err = run(*flags)
    answers = answered(out)
    assert (code, err) == (0, "")
    assert [answer["text"] for answer in answers] == TEXTS
    for answer in answers:
        _, tokens, offsets = store.tokenizer.encode_with_offsets(answer["text"])
        assert [token["token"] for token in answer["tokens"]] == tokens
        assert [(token["start"], token["end"]) for token in answer["tokens"]] == offsets
    batch = row_of(store.tokenizer.encode_batch(TEXTS[:1])[0], store.tokenizer)
    logits = objective.bind(params).discriminate(batch["input_ids"], context(batch), None)
    expected = special.expit(np.asarray(logits)[0, 1 : 1 + len(answers[0]["tokens"])])
    found = [token["probability"] for token in answers[0]["tokens"]]
    np.testing.assert_allclose(found, expected, atol=1e-4)
    lines = stream(*({"text": text} for text in TEXTS))
    assert answered(run(*flags[:2], stdin=lines)[1])[0] == answers[0]


def test_masks_are_filled_with_what_the_generator_says(pretrained, store, run):
    path, _, objective, params = pretrained
    text = "the [MASK] is read [MASK]."
    flags = [f"--workdir={path}", "--mode=fill", "--top_k=3"]
    lines = stream({"text": text}, {"text": "no mask"})
    with_masks, without = answered(run(*flags, stdin=lines)[1])
    assert without == {"text": "no mask", "masks": []}
    assert [text[m["start"] : m["end"]] for m in with_masks["masks"]] == ["[MASK]"] * 2
    tokenizer = store.tokenizer
    ids, _, _ = encode_with_special_tokens(tokenizer, text)
    batch = row_of(ids, tokenizer)
    positions = jnp.flatnonzero(batch["input_ids"][0] == tokenizer.mask_id)[None]
    logits = objective.bind(params).generate(batch["input_ids"], context(batch), positions, None)
    shares = special.softmax(np.asarray(logits, np.float64), axis=-1)[0]
    for mask, share in zip(with_masks["masks"], shares, strict=True):
        best = np.argsort(-share)[:3]
        assert [p["token"] for p in mask["proposals"]] == [tokenizer.vocab[i] for i in best]
        found = [p["probability"] for p in mask["proposals"]]
        np.testing.assert_allclose(found, share[best], atol=1e-4)


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_vectors_are_means_or_first_states(pretrained, store, run, tmp_path, pooling):
    """Of a text of several pieces, over the tokens of all; [CLS] is that of the first."""
    path, _, objective, params = pretrained
    (tmp_path / "in.txt").write_text("\n".join(TEXTS))
    flags = [f"--workdir={path}", "--mode=embed", f"--pooling={pooling}"]
    flags += [f"--input={tmp_path / 'in.txt'}", f"--output={tmp_path / 'out.npy'}"]
    assert run(*flags)[0] == 0
    found = np.load(tmp_path / "out.npy")
    assert (found.dtype, found.shape) == (np.float32, (3, 32))
    for text, vector in zip(TEXTS, found, strict=True):
        (ids,) = store.tokenizer.encode_batch([text])
        states = []
        for begin in range(0, max(1, len(ids)), 30):
            batch = row_of(ids[begin : begin + 30], store.tokenizer)
            model = objective.bind(params)
            states.append(model.discriminator_states(batch["input_ids"], context(batch), None)[0])
        expected = np.concatenate(states).mean(axis=0) if pooling == "mean" else states[0][0]
        np.testing.assert_allclose(vector, expected, atol=1e-5)


def test_page_and_terminal_show_hostile_text_as_text(pretrained, run, tmp_path):
    token = {"token": "<b>\x1b[31m\u202e\"'", "starts_word": True, "probability": 0.9}
    token |= {"original": "<script>", "proposals": [("&", 0.5)]}
    assert "\x1b[31m" not in gallery.as_terminal([token]).removeprefix("\x1b[38;5;16;48;5;202m")
    assert "\\u001b[31m" in gallery.as_terminal([token])
    page = texts_page([[token]])
    body = page[page.index("<section>") :]
    assert "<b>\x1b" not in body and "<script>" not in body
    assert "<b>\\u001b[31m\\u202e\"'" in html.unescape(body)
    assert "replaces <b>&lt;script&gt;</b>" in body
    (tmp_path / "in.txt").write_text("<script>alert(1)</script>")
    flags = [f"--workdir={pretrained[0]}", "--mode=detect", f"--input={tmp_path / 'in.txt'}"]
    assert run(*flags, f"--output={tmp_path / 'page.html'}")[0] == 0
    assert "script" not in re.findall(r"<(\w+)", (tmp_path / "page.html").read_text())


@pytest.mark.parametrize("probability", [0.0, 0.1, 0.3, 0.9, 1.0])
def test_a_line_on_a_terminal_has_all_its_words(probability):
    pieces = {"it": True, "rain": True, "##s": False, ".": True}
    text = [
        {"token": token, "starts_word": starts, "probability": probability}
        for token, starts in pieces.items()
    ]
    line = gallery.as_terminal(text)
    assert re.sub(r"\x1b\[[0-9;]*m", "", line) == "it rains ."
    assert ("\x1b" in line) == (probability >= 0.2)


@pytest.mark.parametrize("target", ["classification", "multilabel", "regression"])
def test_tables(store, run, tmp_path, target):
    """From a file and from a stream, with the columns and labels of the run."""
    options = {"value_range": (2.0, 6.0)} if target == "regression" else {"labels": ("dry", "wet")}
    _, objective, params = finetuned(
        tmp_path / "run", store, "table", target=target, text=("title", "body"), **options
    )
    pairs = [*MEANT.items()] * 3  # not a multiple of the devices
    table = "".join(f'"{title}","{body}"\n' for title, body in pairs)
    (tmp_path / "new.csv").write_text("title,body\n" + table)
    flags = [f"--workdir={tmp_path / 'run'}"]
    output = tmp_path / "answers.json"
    new = f"--input={tmp_path / 'new.csv'}"
    assert run(*flags, new, f"--output={output}") == (0, "", "")
    answers = json.loads(output.read_text())
    batch = jax.tree.map(jnp.asarray, encode_texts(store.tokenizer, pairs, 48))
    logits = np.asarray(objective.outputs(params, batch)["logits"], np.float64)
    assert [answer["id"] for answer in answers] == list("012345")
    if target == "regression":
        expected = 2.0 + 4.0 * logits
        np.testing.assert_allclose([answer["label"] for answer in answers], expected, rtol=1e-5)
    else:
        is_one = target == "classification"
        expected = special.softmax(logits, axis=-1) if is_one else special.expit(logits)
        found = [list(answer["probabilities"].values()) for answer in answers]
        np.testing.assert_allclose(found, expected, atol=1e-5)
        assert list(answers[0]["probabilities"]) == ["dry", "wet"]
    streamed = stream(*({"title": a, "body": b, "id": "k"} for a, b in pairs[:2]))
    _, out, _ = run(*flags, stdin=streamed + '{"title": "no body"}\n[]\nx\n')
    *first, missing, array, not_json = answered(out)
    assert [answer.pop("id") for answer in first] == ["k", "k"]
    for answer, same in zip(first, answers, strict=False):
        assert answer["label"] == same["label"] or target == "regression"
    assert missing == {"error": "line 3: there is no column 'body'; found title"}
    assert array == {"error": "line 4: not a JSON object but list"}
    assert not_json["error"].startswith("line 5: not JSON")


def test_glue(store, run, tmp_path):
    finetuned(tmp_path / "run", store, "glue", name="rte", source="gone")
    (tmp_path / "test.tsv").write_text('index\tsentence1\tsentence2\n8\tIt "rains\tIt is wet\n')
    flags = [f"--workdir={tmp_path / 'run'}", f"--input={tmp_path / 'test.tsv'}"]
    (answer,) = answered(run(*flags)[1])
    assert answer["id"] == "8"
    assert answer["probabilities"].keys() == {"entailment", "not_entailment"}
    assert sum(answer["probabilities"].values()) == pytest.approx(1)


@pytest.mark.parametrize("unanswerable", [False, True])
def test_questions(store, run, tmp_path, unanswerable):
    finetuned(tmp_path / "run", store, "squad", name="qa", unanswerable=unanswerable, doc_stride=8)
    contexts = ["  Rain\u0301 fell \U0001f327 in the city.\n" * 4, "The sun shines. " * 9]
    question = "What fell?"
    keyed = [*zip("ab", contexts, strict=True)]
    entries = [{"context": x, "qas": [{"id": key, "question": question}]} for key, x in keyed]
    (tmp_path / "new.json").write_text(json.dumps({"data": [{"paragraphs": entries}]}))
    flags = [f"--workdir={tmp_path / 'run'}"]
    found = answered(run(*flags, f"--input={tmp_path / 'new.json'}")[1])
    lines = stream(*({"id": key, "question": question, "context": x} for key, x in keyed))
    streamed = answered(run(*flags, stdin=lines)[1])
    for answers in (found, streamed):
        for (key, text), answer in zip(keyed, answers, strict=True):
            assert answer["id"] == key
            assert len(answer["n_best"]) > 1
            for span in answer["n_best"]:
                assert text[span["start"] : span["end"]] == span["text"]
            if answer["text"]:
                assert text[answer["start"] : answer["end"]] == answer["text"]
                assert answer["probability"] == answer["n_best"][0]["probability"]
            else:
                assert unanswerable and answer["start"] is answer["end"] is None
    assert [x["text"] for x in found] == [x["text"] for x in streamed]


@pytest.mark.parametrize("scheme", ["BIO", "plain"])
def test_tags(store, run, tmp_path, scheme):
    labels = ("-LRB-", "N", "O") if scheme == "plain" else ("O", "B-X", "I-X", "E-X", "S-X")
    task, objective, params = finetuned(
        tmp_path / "run", store, "tagging", name="tags", scheme=scheme, labels=labels
    )
    assert task.head.labels == labels
    sentences = [["EU", "rejects", "\x00"], ["the"] * 60]
    columns = "\n\n".join("\n".join(f"{word}\tx\tO" for word in words) for words in sentences)
    (tmp_path / "columns.txt").write_text(columns)
    (tmp_path / "sentences.txt").write_text("\n".join(map(" ".join, sentences)))
    flags = [f"--workdir={tmp_path / 'run'}"]
    inputs = [f"--input={tmp_path / name}.txt" for name in ("columns", "sentences")]
    by_column = answered(run(*flags, inputs[0])[1])
    by_line = answered(run(*flags, inputs[1], "--sentences")[1])
    lines = stream({"words": sentences[0]}, {"text": "EU rejects \x00"})
    streamed = answered(run(*flags, stdin=lines)[1])
    assert [answer["words"] for answer in by_column] == sentences
    assert [answer["tags"] for answer in by_column] == [answer["tags"] for answer in by_line]
    assert [answer["tags"] for answer in streamed] == [by_column[0]["tags"]] * 2
    ids = [x or [store.tokenizer.unk_id] for x in store.tokenizer.encode_batch(sentences[0])]
    batch = row_of([i for word in ids for i in word], store.tokenizer)
    firsts = np.cumsum([1, *map(len, ids)])[:-1]
    logits = np.asarray(objective.outputs(params, batch)["logits"], np.float64)[0, firsts]
    expected = special.softmax(logits, axis=-1).max(axis=-1)
    np.testing.assert_allclose(by_column[0]["probabilities"], expected, atol=1e-5)


def test_mistakes_are_one_line(pretrained, store, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    finetuned(Path("tuned"), store, "glue", name="rte", source="gone")
    Path("trials", "trial_0").mkdir(parents=True)
    Path("new.csv").write_text("a,b\n1,2\n")
    Path("texts.jsonl").write_text('{"text": "a"}\n')
    (pretrained[0] / "metrics.jsonl").touch()
    pre = f"--workdir={pretrained[0]}"
    embed, fill = f"{pre} --mode=embed", f"{pre} --mode=fill --input=texts.jsonl"
    for flags, message in {
        "": "--workdir is missing",
        "--workdir=nowhere": "nowhere/config.json not found: nowhere is not the directory",
        "--workdir=trials": "give one: trials/trial_0",
        pre: "--mode is missing; allowed for .*: detect, fill, embed",
        f"{pre} --mode=fil": "--mode is 'fil'; allowed",
        f"{embed} --replace": "--replace is for --mode=detect only",
        f"{embed} --sentences": "--sentences is for fine-tuned",
        f"{embed} --output=x.npy": "--output is given without",
        f"{embed} --input=new.csv --output=x.pt": "that end in .npy, .jsonl",
        f"{embed} --input=new.csv": "no column 'text'; found a, b",
        f"{embed} --input=gone": "gone: cannot be read: No such",
        f"{embed} --input=new.csv --step=2": "no checkpoint of step 2; there are 3",
        "--workdir=tuned --mode=fill": "is fine-tuned and does what it was",
        "--workdir=tuned --input=new.csv": "line 2: there is no column 'sentence1'",
        f"{embed} --poling=cls": "did you mean pooling?",
        f"{embed} --input=": "--input is empty; give a file",
        f"{fill} --output=texts.jsonl": "which is the input or a file of the run itself",
        f"{fill} --output={pretrained[0]}/metrics.jsonl": "the input or a file of the run itself",
    }.items():
        code, out, err = run(*flags.split())
        assert (code, out) == (2, ""), flags
        assert err.startswith("error: ") and err.count("\n") == 1, flags
        assert re.search(message, err), (flags, err)
