"""A Task in a TorchTrainer of two workers: python -m tests.ray.train_job FOLDER [drain].

With `drain` in a cluster of its own, whose node with the workers is announced to go, once training
is under way.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def loop(config: dict[str, Any]) -> dict[str, Any]:
    """Train in a worker."""
    import torch

    from tests.helpers.toy import Line, loader
    from trainkit import Trainer
    from trainkit.callbacks import RayReport

    folder = Path(config["folder"])

    class Slow(Line):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if config["drain"]:
                time.sleep(0.2)
                (folder / "node").write_text(ray.get_runtime_context().get_node_id())
            with (folder / f"steps-{self.trainer.global_rank}.txt").open("a") as file:
                print(self.global_step, file=file)
            return super().training_step(batch, batch_idx)

    torch.set_num_threads(1)
    report = RayReport(preemption_interval_s=0.5)
    epochs = 20 if config["drain"] else 2
    run_dir = str(folder / "run")
    trainer = Trainer(
        max_epochs=epochs,
        run_dir=run_dir,
        callbacks=[report],
        logger=False,
        enable_progress_bar=False,
    )
    trainer.fit(Slow(), loader(23), loader(7), ckpt_path=RayReport.checkpoint())
    values = [
        float(value) for p in trainer.run.task.parameters() for value in p.detach().reshape(-1)
    ]
    return {"world": trainer.world_size, "engine": trainer.engine.name, "weights": values}


def drain(folder: Path, address: str) -> None:
    """Announce that the workers' node is taken away, once they train."""
    while not (folder / "node").exists():
        time.sleep(0.1)
    time.sleep(2)
    words = [
        "--reason",
        "DRAIN_NODE_REASON_PREEMPTION",
        "--reason-message",
        "spot",
        "--deadline-remaining-seconds",
        "120",
    ]
    node = (folder / "node").read_text()
    subprocess.run(
        [
            sys.executable,
            "-m",
            "ray.scripts.scripts",
            "drain-node",
            "--address",
            address,
            "--node-id",
            node,
            *words,
        ],
        check=True,
    )
    (folder / "drained").write_text(node)


def main() -> None:
    """Train, and print the result."""
    folder, drains = Path(sys.argv[1]), "drain" in sys.argv[2:]
    folder.mkdir(parents=True, exist_ok=True)
    if drains:
        cluster = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 0, "dashboard_port": int(sys.argv[3])}
        )
        for _ in range(2):
            cluster.add_node(num_cpus=2)
        os.environ["RAY_ADDRESS"] = cluster.address
    ray.init(
        log_to_driver=drains, runtime_env={"env_vars": {"PYTHONPATH": os.environ["PYTHONPATH"]}}
    )
    if drains:
        import threading

        threading.Thread(target=drain, args=(folder, cluster.address), daemon=True).start()
    result = TorchTrainer(
        loop,
        train_loop_config={"folder": str(folder), "drain": drains},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            name="train",
            storage_path=str(folder / "ray"),
            failure_config=FailureConfig(max_failures=1) if drains else FailureConfig(),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    ).fit()
    checkpoint = None if result.checkpoint is None else result.checkpoint.path
    print(
        "RESULT",
        json.dumps(
            {"metrics": result.metrics, "checkpoint": checkpoint, **(result.return_value or {})}
        ),
        flush=True,
    )
    ray.shutdown()
    if drains:
        cluster.shutdown()


if __name__ == "__main__":
    main()
