"""Contains what `check_tpu` and `check_cuda` share: compiling every program of planned servers, and reporting."""

import argparse
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from meshserve.runtime.options.serve_config import ServeConfig
from meshserve.runtime.plan.aot import KnownKey, ProgramReport
from meshserve.runtime.plan.memory_plan import Planner
from meshserve.runtime.plan.report import PlanRequest, compile_with_table, plan_json, plan_table, planner_of


def planner(model: str, target: str, **options: Any) -> Planner:
    """Plans a server of a published model size on a whole target."""
    return planner_of(PlanRequest(config=ServeConfig(model=model, **options), target=target))


def parser(description: str, *, models: Sequence[str], targets: Sequence[str]) -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=description)
    found.add_argument("--models", nargs="*", default=models, help="published sizes (default: %(default)s)")
    found.add_argument("--targets", nargs="*", default=targets, help="machines (default: %(default)s)")
    found.add_argument(
        "--tokens", nargs="*", type=int, default=(), help="token counts of the steps to compile (default: all)"
    )
    found.add_argument(
        "--layers",
        type=int,
        default=0,
        help="compile only this many layers of each model, to save time, and leave out the expectations that need all "
        "layers (default: all)",
    )
    found.add_argument("--json", help="file to append one line per planned server to")
    return found


def check(planned: Iterable[Planner], options: argparse.Namespace) -> list[str]:
    """Compiles the programs of each server, prints its tables and returns the failed expectations."""
    jax.config.update("jax_platforms", "cpu")  # the programs are for another platform and are never run here
    faults: list[str] = []
    known: dict[KnownKey, ProgramReport] = {}
    for plan in planned:
        has_all_layers = options.layers in (0, plan.server.model.num_layers)
        if not has_all_layers:
            plan = plan.replan(model=dataclasses.replace(plan.server.model, num_layers=options.layers))
        if options.tokens:
            plan = with_steps(plan, options.tokens)
        print("\n" + plan_table(plan.plan()), flush=True)
        compiled = compile_with_table(plan, known, has_all_layers=has_all_layers)
        faults += [f"{plan.name} on {plan.target.name}: {fault}" for fault in compiled.faults]
        if options.json:
            with open(options.json, "a", encoding="utf-8") as file:
                file.write(plan_json(plan.plan(), compiled) + "\n")
    return faults


def with_steps(plan: Planner, token_counts: Sequence[int]) -> Planner:
    """Returns the plan with only the steps of these numbers of tokens.

    Raises:
      SystemExit: None of them may have prompts.
    """
    mixed = [bucket.num_tokens for bucket in plan.server.buckets if not bucket.is_decode]
    if not set(mixed) & set(token_counts):
        raise SystemExit(f"--tokens selects no step that may hold prompts; add one of {mixed}.")
    buckets = tuple(bucket for bucket in plan.server.buckets if bucket.num_tokens in token_counts)
    return dataclasses.replace(plan, server=dataclasses.replace(plan.server, buckets=buckets))


def verdict(faults: Sequence[str]) -> int:
    """Prints the failures and returns the exit status."""
    print("\n" + ("\n".join(faults) if faults else "every expectation holds"))
    return 1 if faults else 0
