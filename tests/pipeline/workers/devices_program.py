"""Trains the given items in a process of its own, since JAX fixes its devices at the first import.

devices_program.py FOLDER: reads `given.pickle` there; writes `tree.pickle`; prints what else the test looks at as JSON.
"""

import json
import pickle
import sys
from dataclasses import replace
from pathlib import Path

import jax

from contracts.errors import ConfigError
from pipeline.workers.trainer import TrainerWorker

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

folder = Path(sys.argv[1])
parts, student, items = pickle.loads((folder / "given.pickle").read_bytes())

odd = parts.config.model_copy(update={"training": parts.config.training.model_copy(update={"rows": 5})})
try:
    TrainerWorker(replace(parts, config=odd), str(folder / "odd"), name="trainer-0")
    refusal = ""
except ConfigError as error:
    refusal = str(error)

trainer = TrainerWorker(parts, str(folder / "checkpoints"), name="trainer-0")
trainer.load(student)
for rollout, targets in items:
    trainer.accumulate(rollout, targets)
report = trainer.update()
trainer.save()
versions = trainer.restore()
(folder / "tree.pickle").write_bytes(pickle.dumps(trainer.publish()))
parameters = trainer._trainer().live_state().trees["parameters"]
print(
    json.dumps(
        {
            "devices": sorted({len(array.sharding.device_set) for array in parameters.values()}),
            "metrics": dict(report.metrics),
            "restored": versions == [report.version],
            "refusal": refusal,
        }
    )
)
