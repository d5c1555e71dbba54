"""An encoder, an objective, heads and a task that the package knows nothing of."""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from electra_jax.data.features import encode_texts
from electra_jax.data.opening import read_lines
from electra_jax.errors import UserError
from electra_jax.files import write_text
from electra_jax.finetune.heads import HEADS
from electra_jax.finetune.heads.base import LOSS, Head
from electra_jax.finetune.tasks.base import Files, Task
from electra_jax.modeling.attention import Segments, attend
from electra_jax.modeling.electra import Electra
from electra_jax.modeling.encoders.base import Context, Embeddings, Encoder, EncoderConfig, table
from electra_jax.modeling.layers import PRNGKey, dense, gelu, glorot_uniform, layer_norm
from electra_jax.objectives.base import (
    Batch,
    Inputs,
    Sums,
    binary_cross_entropy,
    context,
    is_real,
    pair,
)
from electra_jax.objectives.corruption import CorruptedText
from electra_jax.objectives.masking import Masked
from electra_jax.objectives.metrics import Metric
from electra_jax.settings import COUNT, POSITIVE, setting


@dataclasses.dataclass(frozen=True)
class LocalConfig(EncoderConfig):
    reach: int = setting(3, "tokens to either side that are seen", COUNT)


class LocalEmbeddings(Embeddings):
    """Words alone: there are no positions."""

    def __init__(
        self, config: LocalConfig, rngs: nnx.Rngs, table_init: nnx.Initializer | None = None
    ):
        init = table_init or glorot_uniform
        self.word = table(config.vocab_size, config.embedding_size, init, rngs)
        self.norm = layer_norm(config.embedding_size, config.dtype, rngs, depth="input", bias=False)
        self.rate = 0.0

    def look_up(self, ids: Int[Array, "B L"], context: Context) -> Float[Array, "B L E"]:
        return self.word[ids]


class LocalLayer(nnx.Module):
    """Normalized in front, local, without biases; every other layer sees nothing but itself."""

    def __init__(self, config: LocalConfig, rngs: nnx.Rngs):
        width, inner = config.hidden_size, config.intermediate_size
        heads = (config.num_heads, width // config.num_heads)
        common = (glorot_uniform, config.dtype, rngs)
        self.norm = layer_norm(width, config.dtype, rngs, bias=False)
        self.value = dense(width, heads, *common, ("embed", "heads", None), bias=False)
        self.out = dense(heads, width, *common, ("heads", None, "embed"), bias=False)
        self.wide = dense(width, inner, *common, ("embed", "mlp"), bias=False)
        self.narrow = dense(inner, width, *common, ("mlp", "embed"), bias=False)
        self.reach = config.reach

    @staticmethod
    def flops_per_token(config: LocalConfig, length: int) -> int:
        return 4 * config.hidden_size * (config.hidden_size + config.intermediate_size)

    def __call__(
        self,
        x: Float[Array, "B L H"],
        segments: Segments,
        key: PRNGKey | None,
        is_local: Int[Array, ""],
    ) -> Float[Array, "B L H"]:
        value = self.value(self.norm(x))
        window = self.reach * is_local
        x += self.out(attend(value, value, value, segments, window=window))
        return x + self.narrow(gelu(self.wide(x)))


class Local(Encoder):
    Config, Embeddings, Layer = LocalConfig, LocalEmbeddings, LocalLayer

    def layer_flags(self) -> tuple[Array, ...]:
        return (jnp.arange(self.num_layers) % 2,)


class ParityHead(nnx.Module):
    """Whether the id of the original token is odd."""

    def __init__(self, config: EncoderConfig, rngs: nnx.Rngs):
        self.odd = dense(config.hidden_size, 1, glorot_uniform, config.dtype, rngs)

    @staticmethod
    def flops_per_token(config: EncoderConfig, predicted_share: float) -> float:
        return 2.0 * config.hidden_size

    def __call__(self, hidden: Float[Array, "B L H"]) -> Float[Array, "B L"]:
        return self.odd(hidden)[..., 0].astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class Parity(CorruptedText):
    """The discriminator tells odd tokens from even ones in a corrupted text."""

    @dataclasses.dataclass(frozen=True)
    class Settings:
        sharpness: float = setting(1.0, "multiplies the logits", POSITIVE)

    sharpness: float = 1.0

    discriminator_term: ClassVar[str] = "parity_loss"
    head: ClassVar[type] = ParityHead
    metrics: ClassVar[dict[str, Metric]] = CorruptedText.metrics | {
        "parity_loss": Metric("parity loss", "nats", better="lower", console="parity", jumps=True),
        "parity_share": Metric("odd", better="higher", figure="Share of odd tokens", tile="{:.1%}"),
    }

    @classmethod
    def arguments(cls, config, tokenizer, token_counts) -> dict[str, Any]:
        arguments = super().arguments(config, tokenizer, token_counts)
        return arguments | {"sharpness": config.loss.sharpness}

    def loss_mask(self, batch: Batch, masked: Masked) -> Bool[Array, "B L"]:
        return is_real(batch)

    def discriminator_sums(
        self, model: Electra, corrupted_ids: Int[Array, "B L"], inputs: Inputs, key: PRNGKey | None
    ) -> Sums:
        weights = is_real(inputs.batch).astype(jnp.float32)
        odd = (inputs.batch["input_ids"] % 2).astype(jnp.float32)
        logits = self.sharpness * model.discriminate(corrupted_ids, context(inputs.batch), key)
        return {
            "parity_loss": pair(binary_cross_entropy(logits, odd), weights),
            "parity_share": pair((logits > 0).astype(jnp.float32), weights),
        }


class Rate(nnx.Module):
    def __init__(self, encoder, rngs):
        self.output = dense(encoder.hidden_size, 1, glorot_uniform, encoder.dtype, rngs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counting(Head):
    """How many there are of something, with the loss of Poisson's distribution."""

    scale: float = 1.0

    metrics: ClassVar = {
        "loss": LOSS,
        "mean_count": Metric("mean count", console="count", figure="Counts"),
    }
    from_data: ClassVar = ("scale",)

    def layers(self, encoder, rngs):
        return Rate(encoder, rngs)

    def sums(self, layers, hidden, batch, key):
        log_rate, weights = self.outputs(layers, hidden, batch)["log_rate"], self.weights(batch)
        loss = jnp.exp(log_rate) - batch["count"] * log_rate
        return {"loss": pair(loss, weights), "mean_count": pair(jnp.exp(log_rate), weights)}

    def outputs(self, layers, hidden, batch):
        return {"log_rate": layers.output(hidden[:, 0])[:, 0].astype(jnp.float32)}


class CountTask(Task):
    """Lines such as `3|some text`; the number is to be found."""

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Settings(Files):
        separator: str = setting("|", "between number and text")
        scale: float = setting(1.0, "of the numbers", POSITIVE)

    metrics: ClassVar = {"error": Metric("error of counts", better="lower", figure="Counts")}

    @property
    def head(self):
        return HEADS["counting"](scale=self.settings.scale)

    def is_labeled(self, example):
        return bool(example[0])

    def read_file(self, split, path):
        return [tuple(line.split(self.settings.separator)) for line in read_lines(path)]

    def features(self, examples, tokenizer, max_length, training):
        arrays = encode_texts(tokenizer, [(text, None) for _, text in examples], max_length)
        arrays["example"] = np.arange(len(examples), dtype=np.int32)
        if all(map(self.is_labeled, examples)):
            counts = [int(number) for number, _ in examples]
            arrays["count"] = np.array(counts, np.float32) / self.settings.scale
        return arrays

    def predict(self, examples, features, outputs):
        return (self.settings.scale * np.exp(outputs["log_rate"])).tolist()

    def compare(self, examples, predictions):
        errors = [
            abs(int(number) - x) for (number, _), x in zip(examples, predictions, strict=True)
        ]
        return {"error": float(np.mean(errors))}

    def floor(self, examples):
        return -1.0

    def write(self, predictions, directory, split):
        return [write_text(directory / f"{split}.txt", "\n".join(map(str, predictions)))]

    def example(self, number, values, where):
        if "text" not in values:
            raise UserError(f"{where}: there is no text")
        return "", values["text"]

    def answer(self, prediction):
        return {"count": prediction}
