"""ELECTRA-Small, the defaults: 12 layers of 256, a generator of a quarter of the width.

    python -m electra_jax.main --config=configs/small.py --workdir=runs/small \
        --config.data.source='corpus/*.txt'

14,196,219 parameters while pre-training, of which the discriminator keeps 13,549,057.

The numbers are the released code's defaults. Length and batch stand in the paper, the others in
its appendix, read through a third party's copy. About the generator the sources disagree: the
published small checkpoint has one of full width (see `small_plus.py`), and the paper's training
FLOPs fit half the width. `--config.generator.width` is the knob.
"""

from ml_collections import ConfigDict

from electra_jax.config import get_config as default_config


def get_config() -> ConfigDict:
    return default_config()
