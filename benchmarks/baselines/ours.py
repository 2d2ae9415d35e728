"""Runs meshserve's engine without a server, with random weights, all requests at once."""

import atexit

import jax

from meshserve.benchmarks.lib.offline_engine import OfflineEngine, config_for
from meshserve.benchmarks.lib.token_times import RunTimes
from meshserve.runtime.model_files.quantization import NOT_QUANTIZED
from meshserve.runtime.startup.launch import open_model

from .job import Batch, Job, Started, serve_job


def start(job: Job) -> Started:
    quantize = str(job.settings.get("quantize", NOT_QUANTIZED))
    fp8_head = bool(job.settings.get("fp8_head", False))
    model, make_params = open_model(job.model, random_weights=True, quantize=quantize, fp8_head=fp8_head)
    config = config_for(
        [batch.works for batch in job.batches], {"model": job.model, "dtype": job.dtype, **job.settings}
    )
    engine = OfflineEngine(config, model, make_params)
    engine.engine.start()
    atexit.register(engine.engine.stop)

    def run(batch: Batch) -> RunTimes:
        return engine.run(batch.works, batch.temperature)

    return Started(f"jax {jax.__version__}", run)


if __name__ == "__main__":
    serve_job(start)
