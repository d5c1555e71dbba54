"""Tasks of fine-tuning by name. A new one is one more file and one more line here."""

from electra_jax.finetune.tasks.base import Task
from electra_jax.finetune.tasks.glue import GlueTask
from electra_jax.finetune.tasks.sentences import TableTask
from electra_jax.finetune.tasks.squad import SquadTask
from electra_jax.finetune.tasks.tagging import TaggingTask

TASKS: dict[str, type[Task]] = {
    "glue": GlueTask,
    "squad": SquadTask,
    "tagging": TaggingTask,
    "table": TableTask,
}
