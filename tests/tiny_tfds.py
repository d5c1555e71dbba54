"""A TensorFlow data set that is made on disk, without TensorFlow and without a network."""

from pathlib import Path

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


def make(directory: Path) -> None:
    """Builds the set `tiny_text` below a directory."""
    TinyText(data_dir=str(directory), file_format="array_record").download_and_prepare()
