"""Encoders, one file each. A new one is a class that keeps `base.Encoder`, and a line here."""

import dataclasses
from typing import Any

from electra_jax.modeling.encoders.base import Encoder, EncoderConfig
from electra_jax.modeling.encoders.bert import Bert
from electra_jax.settings import Config

ENCODERS: dict[str, type[Encoder]] = {"bert": Bert}
FIRST = "bert"  # that of files that name none: they were made when there was no other


def encoder_config(model: Config, **given: Any) -> EncoderConfig:
    """An encoder's configuration: what is given, and all else from the settings of the same name.

    Args:
      model: the section `model`, whose setting `encoder` says which one it is.
    """
    given["encoder"] = model.encoder or FIRST
    kind = ENCODERS[given["encoder"]].Config
    names = {field.name for field in dataclasses.fields(kind)} - given.keys()
    return kind(**given, **{name: model[name] for name in names})


def encoder_class(config: EncoderConfig) -> type[Encoder]:
    """The encoder that `config` is of."""
    return ENCODERS[config.encoder]
