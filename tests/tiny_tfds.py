"""A TensorFlow data set that is made on disk, without TensorFlow and without a network."""

from pathlib import Path
from typing import ClassVar

import numpy as np
import tensorflow_datasets as tfds


class TinyText(tfds.core.GeneratorBasedBuilder):
    """500 short documents to train on, 3 others."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        features = tfds.features.FeaturesDict({"text": tfds.features.Text(), "title": np.int64})
        return tfds.core.DatasetInfo(builder=self, features=features)

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples(500), "test": self._generate_examples(3)}

    def _generate_examples(self, count):
        for number in range(count):
            yield number, {"text": f"Document {number}.\n\nSecond line, naïve.", "title": number}


class TinyGlue(tfds.core.GeneratorBasedBuilder):
    """Three configurations in the layout of TensorFlow's `glue`."""

    VERSION = tfds.core.Version("1.0.0")
    BUILDER_CONFIGS: ClassVar = [
        tfds.core.BuilderConfig(name=name) for name in ("mnli", "ax", "stsb")
    ]

    def _info(self):
        label = tfds.features.ClassLabel(names=["entailment", "neutral", "contradiction"])
        features = {name: tfds.features.Text() for name in self._pair}
        features["label"] = np.float32 if self._similarity else label
        features["idx"] = np.int32
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

    @property
    def _similarity(self):
        return self.builder_config.name == "stsb"

    @property
    def _pair(self):
        return ("sentence1", "sentence2") if self._similarity else ("premise", "hypothesis")

    def _split_generators(self, dl_manager):
        splits = {
            "mnli": ["train", "validation_matched", "validation_mismatched", "test_matched"],
            "ax": ["test"],
            "stsb": ["validation"],
        }[self.builder_config.name]
        return {split: self._generate_examples(split.startswith("test")) for split in splits}

    def _generate_examples(self, unlabeled):
        for number in range(20):
            texts = [f"naïve {number}", f"b {number}"]
            label = -1 if unlabeled else number if self._similarity else number % 3
            pair = dict(zip(self._pair, texts, strict=True))
            yield number, {**pair, "label": label, "idx": number}


class TinySquad(tfds.core.GeneratorBasedBuilder):
    """Two questions, one without an answer, in the layout of TensorFlow's `squad/v2.0`."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        text = tfds.features.Text()
        answers = tfds.features.Sequence({"text": text, "answer_start": np.int32})
        fields = {"id": np.str_, "question": text, "context": text, "answers": answers}
        features = tfds.features.FeaturesDict({**fields, "is_impossible": np.bool_})
        return tfds.core.DatasetInfo(builder=self, features=features)

    def _split_generators(self, dl_manager):
        return {"validation": self._generate_examples()}

    def _generate_examples(self):
        for key, answers in (("0", [("naïve", 0), ("b", 6)]), ("1", [])):
            question = {"id": key, "question": "who?", "context": "naïve b"}
            found = [{"text": text, "answer_start": start} for text, start in answers]
            yield key, {**question, "answers": found, "is_impossible": not answers}


def make(directory: Path, builder: type[tfds.core.GeneratorBasedBuilder] = TinyText) -> None:
    """Builds a set below a directory in all of its configurations, such as `tiny_glue/mnli`."""
    for config in builder.BUILDER_CONFIGS or [None]:
        made = builder(data_dir=str(directory), config=config, file_format="array_record")
        made.download_and_prepare()
