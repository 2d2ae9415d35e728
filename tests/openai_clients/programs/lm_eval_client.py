"""lm-eval's `local-completions` and `local-chat-completions`: scores the tasks of a folder and prints what it found.

python lm_eval_client.py URL TOKENIZER TASKS
"""

import json
import sys
from pathlib import Path

import lm_eval
import yaml


def task(path: Path) -> dict:
    """Returns a task, with the place of its data."""
    found = yaml.safe_load(path.read_text())
    found["dataset_kwargs"]["data_files"]["test"] = str(path.parent / "plays.jsonl")
    return found


def samples(results: dict) -> dict:
    """Returns what was found for each document of each task."""
    return {
        name: [{"doc": each["doc"], "resps": each["resps"], "filtered": each["filtered_resps"]} for each in found]
        for name, found in results["samples"].items()
    }


def main(url: str, tokenizer: str, tasks: Path) -> None:
    names = ("plays_choice", "plays_rolling", "plays_generation")
    arguments = {
        "model": "demo", "base_url": f"{url}/completions", "tokenizer": tokenizer, "tokenizer_backend": "huggingface",
        "tokenized_requests": True, "num_concurrent": 1, "batch_size": 3, "max_length": 512, "max_retries": 1,
    }  # fmt: skip
    rest = {"cache_requests": False, "log_samples": True, "bootstrap_iters": 0}
    found = {}
    for label, change, tried in (
        ("one_by_one", {}, names),
        ("concurrent", {"num_concurrent": 4, "batch_size": 1}, names),
        ("as_text", {"tokenized_requests": False}, names[:1]),
        ("remote", {"tokenizer": None, "tokenizer_backend": "auto"}, names[:2]),  # the server's /tokenize
    ):
        done = lm_eval.simple_evaluate(
            model="local-completions",
            model_args={name: value for name, value in {**arguments, **change}.items() if value is not None},
            tasks=[task(tasks / f"{name}.yaml") for name in tried], **rest,
        )  # fmt: skip
        found[label] = samples(done)
    chat = {
        "model": "demo", "base_url": f"{url}/chat/completions", "num_concurrent": 2, "max_retries": 1,
        "tokenized_requests": False, "tokenizer_backend": None,
    }  # fmt: skip
    done = lm_eval.simple_evaluate(
        model="local-chat-completions", model_args=chat, tasks=[task(tasks / "plays_generation.yaml")],
        apply_chat_template=True, **rest,
    )  # fmt: skip
    found["chat"] = samples(done)
    print(json.dumps(found, default=str))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
