"""`specq run`: where the prompt comes from, what is printed where, how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from factories import tiny_config, write_model, write_tokenizer

from specq.cli.run import join_prompt
from specq.errors import UsageError
from specq.models.causal_lm import CausalLM
from specq.models.loader import load_model
from specq.spec import parts

ARGUMENTS = ("--max-new-tokens", "12", "--pipeline", "plain")
RECORD = {
    *("text", "token_ids", "tokens_out", "finish_reason", "ttft_s", "decode_tps", "e2e_tps", "accept_len"),
    *("accept_len_inner", "rounds", "draft_ms", "intermediate_ms", "verify_ms", "overhead_ms", "pipeline"),
    "environment",
}


@pytest.mark.parametrize(
    ("piped", "text", "is_raw", "prompt"),
    [
        ("notes\n", "sum up", False, "notes\nsum up"),
        ("notes\n", None, False, "notes"),
        ("", "sum up", False, "sum up"),
        (None, "sum up", False, "sum up"),
        ("once\n", "upon", True, "once\nupon"),
        ("  once ", None, True, "  once "),
    ],
)
def test_standard_input_comes_before_the_prompt(piped, text, is_raw, prompt) -> None:
    assert join_prompt(piped, text, is_raw=is_raw) == prompt


@pytest.mark.parametrize(("piped", "text"), [("", None), ("\n\n", ""), (None, None), ("", "  ")])
def test_no_prompt_is_a_usage_error(piped, text) -> None:
    with pytest.raises(UsageError, match="there is no prompt"):
        join_prompt(piped, text, is_raw=False)


def test_bytes_that_are_no_text_are_a_usage_error(call, model) -> None:
    done = call("run", model, stdin="once \udcff")  # as Python reads them in an ASCII locale
    assert (done.code, done.out) == (2, "")
    assert "standard input is not UTF-8 text" in done.err
    assert call("chat", model, stdin="once \udcff\n").code == 2


def test_an_empty_stop_text_is_a_usage_error(call, model) -> None:
    done = call("run", model, "hello", *ARGUMENTS, "--stop", "")
    assert (done.code, done.out) == (2, "")
    assert "a stop text is empty" in done.err


def test_standard_output_is_the_answer(call, model) -> None:
    done = call("run", model, "hello", *ARGUMENTS)
    record = json.loads(call("run", model, "hello", *ARGUMENTS, "--json").out)
    assert done == (0, record["text"] + "\n" * (not record["text"].endswith("\n")), "")
    assert set(record) >= RECORD
    assert record["tokens_out"] == len(record["token_ids"]) == 12
    assert record["finish_reason"] == "length"
    assert record["environment"]["specq"]


def test_no_graphs_reaches_the_models(call, model, monkeypatch) -> None:
    asked = []

    def load(path: Path, **options) -> CausalLM:
        asked.append(options["engine"].use_graphs)
        return load_model(path, **options)

    monkeypatch.setattr(parts, "load_model", load)
    for flags in ([], ["--no-graphs"]):
        assert call("run", model, "hello", *ARGUMENTS, *flags).code == 0
    assert asked == [True, False]


def test_a_single_argument_is_a_model_only_when_it_names_one(call, model, monkeypatch) -> None:
    piped = json.loads(call("run", model, *ARGUMENTS, "--json", stdin="hello\n").out)
    given = json.loads(call("run", model, "hello", *ARGUMENTS, "--json").out)
    assert piped["token_ids"] == given["token_ids"]
    monkeypatch.setenv("SPECQ_CACHE", "/nonexistent/cache")  # so the demo model is not there
    monkeypatch.setenv("SPECQ_DEMO_WHEEL", "")
    prompt = call("run", "hello", *ARGUMENTS, "--offline")
    assert prompt.code == 5  # taken for a prompt to the demo model


def test_events_put_together_are_the_record(call, model) -> None:
    lines = call("run", model, "hello", *ARGUMENTS, "--jsonl").out.splitlines()
    first, *middle, last = [json.loads(line) for line in lines]
    assert (first["event"], last["event"]) == ("start", "end")
    assert {event["event"] for event in middle} == {"text"}
    assert "".join(event["text"] for event in middle) == last["text"]
    assert [i for event in middle for i in event["token_ids"]] == last["token_ids"]


def test_a_flag_wins_over_set_and_set_over_the_recipe(call, model, tmp_path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(f"target: {model}\npipeline: {{name: lookup, draft_length: 3}}\nsampling: {{seed: 1}}\n")

    def record(*arguments: str) -> dict:
        return json.loads(call("run", recipe, "hi", "--max-new-tokens", "4", "--json", *arguments).out)

    assert (record()["pipeline"], record()["seed"]) == ("lookup", 1)
    set_ = ("--set", "pipeline.name=plain", "--set", "sampling.seed=2")
    assert (record(*set_)["pipeline"], record(*set_)["seed"]) == ("plain", 2)
    assert record(*set_, "--pipeline", "lookup", "--seed", "3")["seed"] == 3
    assert record(*set_, "--pipeline", "lookup", "--seed", "3")["pipeline"] == "lookup"


def test_a_stop_text_ends_the_answer_before_it(call, model) -> None:
    text = json.loads(call("run", model, "hello", "--max-new-tokens", "60", "--json").out)["text"]
    stop = text[20:23]
    record = json.loads(call("run", model, "hello", "--json", "--max-new-tokens", "60", "--stop", stop).out)
    assert record["text"] == text[: text.index(stop)]
    assert record["finish_reason"] == "stop"


def test_a_base_model_runs_raw_and_takes_no_system_message(call, tmp_path) -> None:
    folder = write_model(tmp_path / "base", tiny_config())
    write_tokenizer(folder, chat_template=None)
    assert call("run", folder, "once upon", *ARGUMENTS).code == 0
    done = call("run", folder, "once upon", *ARGUMENTS, "--system", "be brief")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("error: `--system` needs a chat template, and the model has none")


def test_a_prompt_longer_than_the_context_names_both(call, model) -> None:
    done = call("run", model, "word " * 200, "--context", "64", "--pipeline", "plain")
    assert (done.code, done.out) == (2, "")
    assert "the context holds 64" in done.err


def test_the_record_names_the_models_in_memory_and_no_other(call, model, tmp_path) -> None:
    small = write_model(tmp_path / "small", tiny_config(num_hidden_layers=1))
    for pipeline, names in (("plain", {"tiny"}), ("sequence", {"tiny", "small"})):
        options = ("--max-new-tokens", "4", "--pipeline", pipeline, "--json")
        record = json.loads(call("run", model, "hello", "--intermediate", small, *options).out)
        assert set(record["environment"]["models"]) == names


def test_models_in_folders_of_one_name_are_both_in_the_record(call, model, tmp_path) -> None:
    other = write_model(tmp_path / "tiny", tiny_config(num_hidden_layers=1))
    options = ("--intermediate", other, "--pipeline", "sequence", "--max-new-tokens", "4", "--json")
    record = json.loads(call("run", model, "hello", *options).out)
    assert set(record["environment"]["models"]) == {str(model), str(other)}


@pytest.mark.parametrize(
    ("flag", "pipeline", "named"),
    [
        ("--drafter", "eagle2", "`--drafter` (drafter.model): "),
        ("--intermediate", "sequence", "`--intermediate` (intermediate.model): "),
    ],
)
def test_what_cannot_draft_is_called_by_its_flag(flag, pipeline, named, call, model, tmp_path) -> None:
    (tmp_path / "notes.txt").touch()
    done = call("run", model, "hello", flag, tmp_path, "--pipeline", pipeline)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"error: {named}`{tmp_path}` holds neither a config.json nor a .gguf file: notes.txt")
    assert "hint: " in done.err
    done = call("run", model, "hello", flag, tmp_path / "none", "--pipeline", pipeline)
    assert done.err.startswith(f"error: {named}`{tmp_path}/none` does not exist\n\nhint: specq fetch MODEL")


def test_a_whole_model_as_a_drafter_is_called_by_its_flag(call, model) -> None:
    done = call("run", model, "hello", "--drafter", model, "--pipeline", "eagle2")
    assert done.code == 6
    assert done.err.startswith("error: `--drafter` (drafter.model): these are the weights of a whole model")


def test_hidden_thinking_is_not_printed_but_recorded(call, tmp_path) -> None:
    folder = write_model(tmp_path / "thinker", tiny_config())
    template = "{{ messages[0]['content'] }}<think>\n"
    write_tokenizer(folder, chat_template=template)
    done = call("run", folder, "hello", *ARGUMENTS, "--thinking", "hide")
    assert done.out == "\n"  # the template opened the thinking, and nothing closed it
    assert call("run", folder, "hello", *ARGUMENTS, "--thinking", "show").out.strip()


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny_config(max_position_embeddings=32768, num_hidden_layers=8)
    return write_model(tmp_path_factory.mktemp("talker"), config, seed=3)


@pytest.mark.skipif(sys.platform == "win32", reason="no signals to send")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_and_sigterm_end_with_the_record(talker, number: signal.Signals, code: int) -> None:
    command = [sys.executable, "-m", "specq", "run", str(talker), "hello", "--max-new-tokens", "30000"]
    options = ["--context", "32768", "--threads", "1", "--pipeline", "plain", "--jsonl"]
    process = subprocess.Popen([*command, *options], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(5)]
    process.send_signal(number)
    lines += process.stdout.readlines()
    process.stdout.close()
    assert process.wait(30) == code
    last = json.loads(lines[-1])
    assert (last["event"], last["finish_reason"]) == ("end", "interrupted")
    assert 3 < last["tokens_out"] < 30000


def test_a_reader_that_goes_away_ends_it_quietly(talker) -> None:
    command = f"{sys.executable} -m specq run {talker} hello --max-new-tokens 30000 --context 32768 --threads 1"
    script = f"set -o pipefail; {command} --jsonl --pipeline plain </dev/null | head -n 2 >/dev/null"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=120, env={**os.environ})
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
