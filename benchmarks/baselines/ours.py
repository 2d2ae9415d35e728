"""Runs meshserve's engine with random weights, all requests at once."""

import atexit

import jax

from meshserve.benchmarks.lib.offline_engine import OfflineEngine, config_for
from meshserve.benchmarks.lib.token_times import RunTimes
from meshserve.benchmarks.lib.workloads import Work
from meshserve.runtime.startup.launch import open_model

from .job import Job, Run, serve_job


def start(job: Job) -> tuple[str, Run]:
    model, make_params = open_model(job.model_dir, random_weights=True)
    config = config_for(job.batches, {"model": job.model_dir, "dtype": job.dtype, **job.settings})
    engine = OfflineEngine(config, model, make_params)
    engine.engine.start()
    atexit.register(engine.engine.stop)

    def run(batch: list[Work]) -> RunTimes:
        return engine.run(batch, job.temperature)

    return f"jax {jax.__version__}", run


if __name__ == "__main__":
    serve_job(start)
