"""Tests `meshserve.LLM`: with the embedded model on two devices, and with a fake engine what a call may be given."""

import asyncio
import dataclasses
import io
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from meshserve import LLM, SamplingParams
from meshserve.runtime.api.errors import ConfigError, EngineStoppedError, InvalidRequestError
from meshserve.runtime.api.request import FinishReason
from meshserve.runtime.offline import llm as llm_module
from meshserve.runtime.offline.prompt_forms import listed_conversations, listed_prompts
from meshserve.runtime.startup import launch as launch_module
from tests.runtime.loopback import INFO, FakeEngine, Letters
from tests.waiting import WAIT_SECONDS, wait_for

SMALL: dict[str, Any] = {
    "dtype": "float32", "page_size": 16, "num_pages": 128, "max_running": 2, "max_step_tokens": 16, "cache_dir": "",
}  # fmt: skip
GREEDY = SamplingParams(max_tokens=12, temperature=0)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", tp=2, show_progress=False, **SMALL) as llm:
        yield llm


# --- with a model


def test_every_form_of_a_prompt_gives_the_same_output(llm: LLM, capsys: pytest.CaptureFixture):
    [expected] = llm.generate("HAMLET:\n", GREEDY)
    ids = list(expected.prompt_token_ids)
    assert expected.prompt == "HAMLET:\n" and expected.finished and len(expected.outputs) == 1
    assert expected.outputs[0].finish_reason == "length" and len(expected.outputs[0].token_ids) == 12
    assert llm.get_tokenizer().decode(expected.outputs[0].token_ids) == expected.outputs[0].text
    assert "tokens/s" in capsys.readouterr().err, "the progress bar"
    forms = [ids, np.array(ids), np.array(ids, np.uint32), {"prompt": "HAMLET:\n"}, {"prompt_token_ids": ids}]
    for form in [*forms, np.array([ids, ids])]:
        for output in llm.generate(form, GREEDY, use_tqdm=False):
            assert output.outputs[0].token_ids == expected.outputs[0].token_ids
            assert list(output.prompt_token_ids) == ids
    assert "tokens/s" not in capsys.readouterr().err
    together = llm.generate([*forms, "ROMEO:\n"], GREEDY, use_tqdm=False)
    assert [output.outputs[0].text for output in together[:-1]] == [expected.outputs[0].text] * len(forms)
    assert together[-1].outputs[0].text != expected.outputs[0].text
    assert [int(output.request_id) for output in together] == sorted(int(output.request_id) for output in together)


def test_samples_parameters_by_prompt_and_logprobs(llm: LLM):
    many = SamplingParams(n=3, max_tokens=5, temperature=1.0, seed=7, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    sampled, greedy = llm.generate(["The sea", "The sky"], [many, GREEDY], use_tqdm=False)
    assert [sample.index for sample in sampled.outputs] == [0, 1, 2]
    assert len({sample.token_ids for sample in sampled.outputs}) == 3
    for sample in sampled.outputs:
        assert sample.logprobs is not None and len(sample.logprobs) == 5 and sample.cumulative_logprob is not None
        chosen = [position[token_id] for position, token_id in zip(sample.logprobs, sample.token_ids, strict=True)]
        assert sum(each.logprob for each in chosen) == pytest.approx(sample.cumulative_logprob)
        for position in sample.logprobs:
            assert sorted(each.rank for each in position.values() if each.rank) == [1, 2]
            assert all(isinstance(each.decoded_token, str) for each in position.values())
    assert sampled.prompt_logprobs is not None and sampled.prompt_logprobs[0] is None
    assert len(sampled.prompt_logprobs) == len(sampled.prompt_token_ids)
    assert greedy.outputs[0].logprobs is None and greedy.outputs[0].cumulative_logprob is None
    assert greedy.prompt_logprobs is None


def test_logprobs_may_be_those_of_the_distribution_sampled_from(llm: LLM):
    """At temperature 0.5 among five tokens; with the same seed, the tokens are those without the choice."""
    choice = {
        "max_tokens": 6,
        "seed": 3,
        "temperature": 0.5,
        "top_k": 5,
        "top_p": 1.0,
        "logprobs": 20,
        "ignore_eos": True,
    }
    raw, processed = llm.generate(
        ["The sea"] * 2,
        [SamplingParams(**choice), SamplingParams(**choice, processed_logprobs=True)],  # type: ignore[typeddict-item]
        use_tqdm=False,
    )
    assert raw.outputs[0].token_ids == processed.outputs[0].token_ids
    assert raw.outputs[0].logprobs is not None and processed.outputs[0].logprobs is not None
    for before, after in zip(raw.outputs[0].logprobs, processed.outputs[0].logprobs, strict=True):
        assert len(before) >= 20 and len(after) == 5, "others cannot be sampled"
        scaled = {token: 2 * before[token].logprob for token in after}
        total = np.logaddexp.reduce(list(scaled.values()))
        for token, found in after.items():
            assert found.logprob == pytest.approx(scaled[token] - total, abs=1e-4)


def test_scores_are_those_of_generation(llm: LLM):
    [sampled] = llm.generate("The sea", SamplingParams(max_tokens=6, seed=3, logprobs=0), use_tqdm=False)
    tokens, prompt = sampled.outputs[0].token_ids, sampled.prompt_token_ids
    whole, short = llm.score([[*prompt, *tokens], list(prompt)])
    assert len(whole) == len(prompt) + len(tokens) - 1 and len(short) == len(prompt) - 1
    assert sampled.outputs[0].logprobs is not None
    chosen = [found[token].logprob for found, token in zip(sampled.outputs[0].logprobs, tokens, strict=True)]
    assert list(whole[len(prompt) - 1 :]) == pytest.approx(chosen, abs=1e-4)
    assert list(whole[: len(prompt) - 1]) == pytest.approx(short, abs=1e-4)


def test_outputs_come_as_they_finish(llm: LLM):
    lengths = (24, 2, 8)
    params = [SamplingParams(max_tokens=length, temperature=0, ignore_eos=True) for length in lengths]
    prompts = ["The sea", "The sky", "The sun"]
    outputs = list(llm.generate_as_finished(prompts, params))  # two run at a time
    assert sorted(int(output.request_id) for output in outputs) != [int(output.request_id) for output in outputs]
    outputs.sort(key=lambda output: int(output.request_id))
    assert [output.prompt for output in outputs] == prompts
    assert [each.outputs for each in outputs] == [
        each.outputs for each in llm.generate(prompts, params, use_tqdm=False)
    ]


def test_outputs_come_as_they_finish_in_asyncio(llm: LLM):
    params = [SamplingParams(max_tokens=length, temperature=0, ignore_eos=True) for length in (24, 2, 8)]
    prompts = ["The sea", "The sky", "The sun"]

    async def collected() -> list[Any]:
        return [output async for output in llm.generate_async(prompts, params)]

    async def both() -> list[list[Any]]:
        return await asyncio.gather(collected(), collected())

    expected = [output.outputs for output in llm.generate(prompts, params, use_tqdm=False)]
    for outputs in asyncio.run(both()):
        outputs.sort(key=lambda output: int(output.request_id))
        assert [output.outputs for output in outputs] == expected


def test_cancelling_in_asyncio_cancels_the_requests(llm: LLM):
    params = SamplingParams(max_tokens=400, temperature=0, ignore_eos=True)

    async def wait_for_one() -> None:
        async for output in llm.generate_async(["The sea"] * 3, params):
            raise AssertionError(f"{output} has finished")

    async def cancelled() -> None:
        task = asyncio.create_task(wait_for_one())
        while not llm._launched.engine.load().num_running:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    wait_for(lambda: not llm._launched.engine._scheduler.requests)


def test_ending_the_iteration_cancels_the_rest(llm: LLM):
    params = [SamplingParams(max_tokens=length, temperature=0, ignore_eos=True) for length in (1, 400)]
    iterator = llm.generate_as_finished(["The sea", "The sky"], params)
    assert len(next(iterator).outputs[0].token_ids) == 1
    iterator.close()  # type: ignore[attr-defined]
    wait_for(lambda: llm._launched.engine.load().num_running == 0)


def test_stop_strings_and_constraints(llm: LLM):
    [whole] = llm.generate("HAMLET:\n", SamplingParams(max_tokens=40, temperature=0), use_tqdm=False)
    word = whole.outputs[0].text.split()[3]
    [cut] = llm.generate("HAMLET:\n", SamplingParams(max_tokens=40, temperature=0, stop=word), use_tqdm=False)
    assert cut.outputs[0].text == whole.outputs[0].text[: whole.outputs[0].text.index(word)]
    assert cut.outputs[0].finish_reason == "stop"
    schema = {"type": "object", "properties": {"acts": {"enum": [4, 5]}}, "required": ["acts"],
              "additionalProperties": False}  # fmt: skip
    params = SamplingParams(max_tokens=60, seed=1, constraint={"json_schema": schema})
    [constrained] = llm.generate("HAMLET:\n", params, use_tqdm=False)
    assert json.loads(constrained.outputs[0].text)["acts"] in (4, 5)


def test_conversations_are_rendered_as_by_the_server(llm: LLM):
    conversation = [{"role": "user", "content": "Who art thou?"}]
    [answer] = llm.chat(conversation, GREEDY, use_tqdm=False)
    assert answer.prompt == "<|im_start|>user\nWho art thou?<|im_end|>\n<|im_start|>assistant\n"
    [raw] = llm.generate(answer.prompt, GREEDY, use_tqdm=False)
    assert raw.outputs == answer.outputs
    first, second = llm.chat([conversation, [*conversation, *conversation]], GREEDY, use_tqdm=False)
    assert first.outputs == answer.outputs and second.prompt != first.prompt
    partial = [*conversation, {"role": "assistant", "content": "I am"}]
    [continued] = llm.chat(partial, GREEDY, use_tqdm=False, continue_final_message=True)
    assert continued.prompt is not None and continued.prompt.endswith("assistant\nI am")


def test_conversations_may_have_openais_form(llm: LLM):
    parts = [{"role": "user", "content": [{"type": "text", "text": "Who art thou?"}], "name": "Ann"}]
    [answer] = llm.chat(parts, GREEDY, use_tqdm=False)
    assert answer.prompt == "<|im_start|>user\nWho art thou?<|im_end|>\n<|im_start|>assistant\n"
    with pytest.raises(InvalidRequestError, match=r"messages\[0\].content\[0\].type: is 'image_url'"):
        llm.chat([{"role": "user", "content": [{"type": "image_url"}]}], GREEDY, use_tqdm=False)


def test_threads_share_the_engine(llm: LLM):
    prompts = [f"Speaker {index}:\n" for index in range(6)]
    alone = [llm.generate(prompt, GREEDY, use_tqdm=False)[0].outputs for prompt in prompts]
    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(lambda prompt: llm.generate(prompt, GREEDY, use_tqdm=False)[0].outputs, prompts))
    assert together == alone


def test_a_prompt_that_cannot_be_served_ends_the_call_and_not_the_engine(llm: LLM):
    too_long = [3] * llm.model_info.max_context_tokens
    with pytest.raises(InvalidRequestError, match="this server accepts"):
        llm.generate(["fine", too_long], GREEDY, use_tqdm=False)
    with pytest.raises(InvalidRequestError, match="is not a token id"):
        llm.generate([5, llm.model_info.vocab_size], GREEDY, use_tqdm=False)
    assert llm.generate([], GREEDY) == []
    assert llm.generate("fine", GREEDY, use_tqdm=False)[0].outputs[0].finish_reason == "length"


def test_a_process_that_does_not_close_it_ends():
    code = f"from meshserve import LLM, SamplingParams; llm = LLM('demo', cpu_devices=1, **{SMALL!r}); "
    code += "print(len(llm.generate('a', SamplingParams(max_tokens=4), use_tqdm=False)[0].outputs))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT_SECONDS)
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
    assert "meshserve: compiling the programs ..." in done.stderr


# --- with a fake engine


class _Engine(FakeEngine):
    """Starts and stops like the engine of `launch`, and keeps requests of 64 tokens open."""

    def start(self) -> None:
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def stop(self) -> None:
        self.is_running = False
        self.thread.join()
        with self.lock:
            pending = [self.last(job, FinishReason.CANCELLED) for job in self.jobs.values()]
        self.deliver(pending)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    def launch(config: Any, deliver: Any, progress: Any) -> Any:
        engine = _Engine(deliver, is_held=lambda job: job.params.max_tokens == 64)
        return SimpleNamespace(
            engine=engine,
            tokenizer=Letters(),
            info=dataclasses.replace(INFO),
            grammars=None,
            close=engine.stop,
            control=SimpleNamespace(is_asleep=False),
            weights=SimpleNamespace(lacks_weights=False),
        )

    monkeypatch.setattr(launch_module, "launch", launch)
    with LLM("fake") as llm:
        yield llm


HELD = SamplingParams(max_tokens=64)


def test_an_interrupted_call_cancels_its_requests(fake: LLM, monkeypatch: pytest.MonkeyPatch):
    engine: Any = fake._launched.engine

    def interrupt(bar: Any, num_finished: int, num_tokens: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(llm_module._Bar, "_show", interrupt)
        patched.setattr(sys, "stderr", io.StringIO())
        fake.generate([[1], [2]], HELD)
    assert engine.cancels == [("0", FinishReason.CANCELLED), ("1", FinishReason.CANCELLED)]
    [after] = fake.generate([7], SamplingParams(max_tokens=2), use_tqdm=False)
    assert after.outputs[0].token_ids == (8, 9), "the outputs of cancelled requests are dropped"


def test_an_engine_that_fails_raises(fake: LLM):
    engine: Any = fake._launched.engine
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(fake.generate, [1], HELD, use_tqdm=False)
        wait_for(lambda: engine.jobs)
        engine.failure = "RuntimeError: device lost"
        engine.deliver([engine.last(job, FinishReason.ERROR, message="lost") for job in engine.jobs.values()])
        with pytest.raises(EngineStoppedError, match="device lost"):
            call.result(WAIT_SECONDS)


def test_closing_it_ends_open_calls(fake: LLM):
    engine: Any = fake._launched.engine
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(fake.generate, [1], HELD, use_tqdm=False)
        wait_for(lambda: engine.jobs)
        fake.close()
        with pytest.raises(EngineStoppedError, match="closed"):
            call.result(WAIT_SECONDS)


def test_the_number_of_parameters_must_be_that_of_the_prompts(fake: LLM):
    with pytest.raises(ValueError, match="2 prompts and 1 sampling_params"):
        fake.generate(["a", "b"], [GREEDY])


# --- what is accepted


def test_forms_of_prompts():
    assert listed_prompts("a") == ["a"] and listed_prompts(["a", "b"]) == ["a", "b"]
    assert listed_prompts([1, 2]) == [(1, 2)] and listed_prompts([[1], (2, 3)]) == [(1,), (2, 3)]
    assert listed_prompts(np.array([1, 2])) == [(1, 2)]
    assert listed_prompts(np.array([[1], [2]])) == [(1,), (2,)]
    assert listed_prompts(np.array(["a", "b"])) == ["a", "b"]
    assert listed_prompts([np.array([1]), "a", {"prompt_token_ids": np.array([2])}]) == [(1,), "a", (2,)]
    assert listed_prompts([]) == []
    assert [type(token_id) for [token_id] in listed_prompts(np.array([[1]], np.int32))] == [int]
    for bad, place in [([1.5], 0), (["a", None], 1), ([[1, "b"]], 0), ([True], 0), (np.array([[0.5]]), 0)]:
        with pytest.raises(InvalidRequestError, match=rf"prompts\[{place}\]: got"):
            listed_prompts(bad)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match=r"prompts\[0\]: got a dictionary of 'text'"):
        listed_prompts({"text": "a"})


def test_forms_of_conversations():
    message = {"role": "user", "content": "a"}
    assert listed_conversations([message]) == [[message]]
    assert listed_conversations([[message], [message, message]]) == [[message], [message, message]]
    assert listed_conversations([]) == []


def test_sampling_parameters_are_checked_when_they_are_made():
    params = SamplingParams(temperature=0.5, stop="END", n=np.int64(2), logit_bias={3: 1}).prompt("a")  # type: ignore[arg-type]
    assert (params.params.temperature, params.params.stop, params.options.n) == (0.5, ("END",), 2)
    assert repr(SamplingParams(top_k=3, stop=["a"])) == "SamplingParams(top_k=3, stop=['a'])"
    vllm = SamplingParams(top_k=-1, seed=-1, max_tokens=None, stop=None).prompt("a")  # type: ignore[arg-type]
    assert (vllm.params.top_k, vllm.params.seed, vllm.params.max_tokens, vllm.params.stop) == (0, None, None, ())
    with pytest.raises(InvalidRequestError, match="sampling.max_tokens: got -1; allowed is 1 or more"):
        SamplingParams(max_tokens=-1)
    with pytest.raises(TypeError, match="no field 'max_token'; did you mean max_tokens?"):
        SamplingParams(max_token=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="no field 'num_resumed_tokens'"):
        SamplingParams(num_resumed_tokens=3)
    with pytest.raises(InvalidRequestError, match="sampling.top_p: got 2.0; allowed is above 0"):
        SamplingParams(top_p=2.0)
    with pytest.raises(InvalidRequestError, match="n: got 0"):
        SamplingParams(n=0)


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        ({"max_runing": 3}, "LLM: unknown key 'max_runing'. Did you mean max_running?"),
        ({"port": 1}, "LLM: port has no effect without a server"),
        ({"tp": "2"}, "LLM: tp is '2'; it must be of type int"),
        ({"tp": -1}, "tp is -1; it must be 1 or more"),
        ({"max_running": True}, "max_running is True; it must be of type int"),
    ],
)
def test_a_wrong_option_is_named(given: dict[str, Any], fault: str):
    with pytest.raises(ConfigError) as caught:
        LLM("demo", **given)
    assert fault in str(caught.value)


def test_automatic_values_and_whole_numbers_are_options():
    config = llm_module.offline_config({"model": "m", "max_running": "auto", "memory_fraction": 1}, print)
    assert (config.max_running, config.memory_fraction, config.model) == (0, 1.0, "m")
    assert config.max_waiting > 10**9
