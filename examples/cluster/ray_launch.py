"""Train under Ray, which starts the group of workers again when one of them is lost.

python examples/cluster/ray_launch.py --folder /shared/run1 --workers 4
"""

from __future__ import annotations

import argparse
from pathlib import Path

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.v2.jax import JaxConfig, JaxTrainer
from train import train


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="that all workers see")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--platform", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--pause", type=float, default=0.0)
    options = parser.parse_args()

    ray.init(include_dashboard=False)
    trainer = JaxTrainer(
        lambda config: train(**config),
        train_loop_config={
            "folder": options.folder / "checkpoints",
            "steps": options.steps,
            "every": 20,
            "pause": options.pause,
        },
        # Has Ray call jax.distributed.initialize() in every worker: on CPUs too, by JAX_PLATFORMS.
        jax_config=JaxConfig(use_gpu=True),
        scaling_config=ScalingConfig(
            num_workers=options.workers, use_gpu=options.platform == "cuda"
        ),
        run_config=RunConfig(
            name="train",
            storage_path=str(options.folder / "ray"),
            failure_config=FailureConfig(max_failures=10),
            worker_runtime_env={"env_vars": {"JAX_PLATFORMS": options.platform}},
        ),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
