"""Runs in a fresh process, since JAX fixes its devices at the first import; prints what the tests look at as JSON.

mesh_program.py meshes                          four host devices, several meshes
mesh_program.py process RANK PORT FOLDER        one of two processes of two devices each
"""

import json
import sys

import jax
import numpy as np
import optax
from conftest import TokenMlp, cross_entropy, distance, make_batch, reference, split

from contracts.errors import BatchValueError
from contracts.losses import close_window
from pipeline.training.checkpoint import CheckpointStore
from pipeline.training.config import TrainingConfig
from pipeline.training.sharding import Placement, training_mesh
from pipeline.training.trainer import PeftTrainer

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")


def trained(optimizer, mesh, depth):
    config = TrainingConfig(gradient_accumulation_steps=depth, mesh=mesh)
    return PeftTrainer(TokenMlp(), optimizer, config).with_loss_fn(cross_entropy)


def window(trainer, batches):
    for batch in batches:
        trainer.accumulate(batch)
    return trainer.update()


def gathered(tree):
    everywhere = jax.jit(
        lambda tree: tree,
        out_shardings=jax.tree.map(lambda leaf: jax.sharding.NamedSharding(leaf.sharding.mesh, jax.P()), tree),
    )
    return jax.tree.map(np.asarray, everywhere(tree))


def remembering(optimizer):
    """`optimizer`, with the gradient it was last given as the first part of its state."""
    keep = optax.GradientTransformation(
        lambda parameters: parameters, lambda gradients, _, parameters=None: (gradients,) * 2
    )
    return optax.chain(keep, optimizer)


def measure(mesh, depth, whole, mine):
    """One window of the batches `mine`, compared with the float64 gradient of `whole`; then two more, with Adam."""
    trainer = trained(remembering(optax.adam(0.05)), mesh, depth)
    start = gathered(trainer.live_state().trees["parameters"])
    loss, gradients, weight = reference(start, whole)
    evaluated = close_window(trainer.evaluate(mine[0]))
    report = window(trainer, mine)
    found = gathered(trainer.live_state().trees["optimizer"][0])
    for _ in range(2):
        window(trainer, mine)
    trees = trainer.live_state().trees
    return trainer, {
        "gradient": distance(found, gradients),
        "loss": abs(report.loss - loss),
        "denominator": abs(report.denominator - weight),
        "evaluation": abs(float(evaluated["loss"]) - reference(start, whole[:1])[0]),
        "compilations": trainer.compilations(),
        "weights": {name: value.tolist() for name, value in gathered(trees["parameters"]).items()},
        "specs": {name: str(leaf.sharding.spec) for name, leaf in trees["parameters"].items()},
        "moments": {name: str(leaf.sharding.spec) for name, leaf in trees["optimizer"][1][0].mu.items()},
        "shard": trees["parameters"]["kernel"].addressable_shards[0].data.size,
    }


def meshes():
    batch = make_batch(8, seed=21)
    results = {}
    for data, fsdp, depth in ((1, 1, 1), (2, 1, 1), (4, 1, 2), (2, 2, 2), (1, 4, 1)):
        mesh = training_mesh(jax.devices()[: data * fsdp], data=data, fsdp=fsdp)
        results[f"{data}x{fsdp} depth {depth}"] = measure(mesh, depth, split(batch, depth), split(batch, depth))[1]
    mesh = training_mesh()
    trainer = trained(optax.sgd(0.1), mesh, 2)
    trainer.accumulate(make_batch(4, seed=1))
    before = trainer.accumulator_digest()
    try:
        trainer.accumulate(make_batch(6, seed=1))
    except BatchValueError as error:
        results["indivisible"] = {"message": str(error), "untouched": trainer.accumulator_digest() == before}
    indivisible = Placement(training_mesh(data=1, fsdp=4), ("data",), "fsdp").parameter_sharding((3, 5))
    results["indivisible parameter"] = str(indivisible.spec)
    return results


def process(rank: int, port: str, folder: str):
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank, heartbeat_timeout_seconds=30)
    # Unequal active tokens: the first process has nearly none, so a mean of per-process means would be far off.
    halves = [make_batch(4, seed=31, weights=None), make_batch(4, seed=32)]
    halves[0]["weights"][1:] = 0
    whole = [{name: np.concatenate([half[name] for half in halves]) for name in halves[0]}]
    results = {"4x1 depth 1": measure(training_mesh(data=4), 1, whole, [halves[rank]])[1]}
    mine = split(halves[rank], 2)
    whole = [
        {name: np.concatenate([split(half, 2)[part][name] for half in halves]) for name in halves[0]}
        for part in range(2)
    ]
    trainer, results["2x2 depth 2"] = measure(training_mesh(data=2, fsdp=2), 2, whole, mine)
    store = CheckpointStore(folder)
    trees = trainer.live_state().trees
    store.save(3, trees, {"ranks": 2})
    restored = store.restore(trees, expected_metadata={"ranks": 2})
    same = jax.tree.map(lambda old, new: bool((old == new).all()), trees, restored.trees)
    results["restored"] = all(jax.tree.leaves(same))
    store.close()
    return results


if __name__ == "__main__":
    arguments = sys.argv[2:]
    results = meshes() if sys.argv[1] == "meshes" else process(int(arguments[0]), arguments[1], arguments[2])
    print(json.dumps(results))
