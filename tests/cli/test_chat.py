"""`specq chat` on a terminal and in a pipe."""

from __future__ import annotations

import json
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from factories import tiny_config, write_model, write_tokenizer

if sys.platform == "win32":
    pytest.skip("needs a pseudo-terminal", allow_module_level=True)

from terminal import Terminal

PROMPT = r"\n(\x1b\[\?2004h)?> "  # readline may announce a bracketed paste before it
STATUS = " · plain · "


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model with room for an answer that lasts seconds, and no token that ends it."""
    config = tiny_config(max_position_embeddings=32768, num_hidden_layers=8)
    return str(write_model(tmp_path_factory.mktemp("talker"), config, seed=3))


@pytest.fixture
def chat(talker: str, tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []

    def start(*arguments: str) -> Terminal:
        arguments = ("chat", talker, "--threads", "1", "--context", "32768", *arguments)
        opened.append(Terminal(*arguments, SPECQ_CACHE=str(tmp_path)))
        opened[-1].wait_for("/help lists the commands")
        opened[-1].wait_for(PROMPT)
        return opened[-1]

    yield start
    for terminal in opened:
        terminal.close()


def test_ctrl_c_stops_the_answer_and_the_next_turn_works(chat, tmp_path) -> None:
    terminal = chat()
    terminal.type("hello\n")
    terminal.wait_for(r"hello\r\n(.*\n)*?.{5}")  # the answer has begun
    terminal.type("\x03")
    assert "interrupted" in terminal.wait_for(PROMPT)
    terminal.type("/set max_new_tokens 3\n")
    terminal.wait_for("max_new_tokens")
    terminal.wait_for(PROMPT)
    terminal.type("again\n")
    status = terminal.wait_for(PROMPT)
    assert "3 tokens" in status
    assert STATUS in status
    terminal.type(f"/save {tmp_path}/chat.json\n")
    terminal.wait_for("saved 2 turns")
    terminal.wait_for(PROMPT)
    terminal.type("\x04")
    assert terminal.exit_code() == 0
    messages = json.loads((tmp_path / "chat.json").read_text())["messages"]
    assert [message["content"] for message in messages[::2]] == ["hello", "again"]


def test_ctrl_c_at_an_empty_prompt_is_130_and_with_text_drops_it(chat) -> None:
    terminal = chat()
    terminal.type("half a mess")
    terminal.wait_for("half a mess")
    terminal.press_ctrl_c()
    terminal.wait_for(PROMPT)
    terminal.type('"""\nline')
    terminal.wait_for(r"\.\.\. line")
    terminal.press_ctrl_c()
    terminal.wait_for(PROMPT)
    terminal.press_ctrl_c()
    assert terminal.exit_code() == 130


def test_sigterm_leaves_the_chat_whatever_was_typed_or_is_being_said(chat) -> None:
    terminal = chat()
    terminal.type("half a mess")
    terminal.wait_for("half a mess")
    assert terminal.terminate() == 143
    terminal = chat()
    terminal.type("hello\n")
    terminal.wait_for(r"hello\r\n(.*\n)*?.{5}")  # the answer has begun
    terminal.process.send_signal(signal.SIGTERM)
    terminal.wait_for("interrupted")
    assert terminal.exit_code() == 143


def test_an_error_at_the_prompt_keeps_the_chat(chat) -> None:
    terminal = chat()
    terminal.type("/spec sequence\n")
    terminal.wait_for("error: pipeline `sequence` cannot run")
    terminal.wait_for(PROMPT)
    terminal.type("/quit\n")
    assert terminal.exit_code() == 0


def test_messages_are_remembered_for_the_next_chat(chat, tmp_path) -> None:
    terminal = chat("--max-new-tokens", "2")
    terminal.type("remember me\n")
    terminal.wait_for(STATUS)
    terminal.wait_for(PROMPT)
    terminal.type("/quit\n")
    assert terminal.exit_code() == 0
    assert (tmp_path / "chat_history").stat().st_mode & 0o077 == 0
    again = chat()
    again.type("\x1b[A\x1b[A")
    again.wait_for("remember me")


def test_a_piped_line_is_a_turn_and_the_answers_are_all_of_standard_output(specq, model) -> None:
    arguments = ["chat", model, "--max-new-tokens", "8", "--pipeline", "plain"]
    done = specq(*arguments, stdin="hello\n\nand\\\nmore\n")
    assert done.code == 0
    assert done.err.count(STATUS) == 2
    document = json.loads(specq(*arguments, "--json", stdin="hello\n\nand\\\nmore\n").out)
    assert done.out == "".join(f"{answer['text']}\n" for answer in document["answers"])
    assert [message["content"] for message in document["messages"]][2] == "and\nmore"
    assert document["answers"][1]["reused_tokens"] > 0


def test_a_cut_at_the_default_length_is_said(call, model, monkeypatch) -> None:
    monkeypatch.setattr("specq.cli.chat_session.CHAT_TOKENS", 6)
    done = call("chat", model, stdin="hello\n")
    assert "cut at 6 tokens: --max-new-tokens N" in done.err


def test_the_models_generation_config_bounds_an_answer(call, model, tmp_path) -> None:
    folder = shutil.copytree(model, tmp_path / "model")
    config = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(config | {"max_new_tokens": 5}))
    assert "cut at 5 tokens: --max-new-tokens N" in call("chat", folder, stdin="hello\n").err


def test_a_block_between_quotes_is_one_message(call, model) -> None:
    stdin = '"""\none\ntwo\\\n/quit\n"""\n'
    done = call("chat", model, "--max-new-tokens", "2", "--json", stdin=stdin)
    assert json.loads(done.out)["messages"][0]["content"] == "one\ntwo\\\n/quit"


def test_a_block_that_begins_with_a_slash_is_no_command(call, model) -> None:
    for block in ("/quit\nno, a file", "//comment"):
        stdin = f'"""\n{block}\n"""\n'
        done = call("chat", model, "--max-new-tokens", "2", "--json", stdin=stdin)
        assert json.loads(done.out)["messages"][0]["content"] == block


def test_a_command_goes_on_after_a_backslash(call, model) -> None:
    done = call("chat", model, "--max-new-tokens", "2", "--json", stdin="/system be\\\nbrief\nhello\n")
    assert json.loads(done.out)["messages"][0] == {"role": "system", "content": "be\nbrief"}


def test_two_slashes_begin_a_message_with_one(call, model) -> None:
    done = call("chat", model, "--max-new-tokens", "2", "--json", stdin="//usr\n")
    assert json.loads(done.out)["messages"][0]["content"] == "/usr"


def test_commands_from_a_pipe(call, model, tmp_path) -> None:
    lines = [
        "/system be brief",
        "hello",
        "/stats",
        "/retry",
        "/set temperature 0.5",
        "/set",
        "/spec lookup",
        "more",
        "/undo",
        f"/save {tmp_path}/chat.json",
        "/reset",
        f"/load {tmp_path}/chat.json",
        "/spec off",
        "/help",
        "/quit",
        "never said",
    ]
    arguments = ["--max-new-tokens", "4", "--pipeline", "plain", "--json", "--quiet"]
    done = call("chat", model, *arguments, stdin="\n".join(lines))
    assert done.code == 0
    document = json.loads(done.out)
    assert [message["role"] for message in document["messages"]] == ["system", "user", "assistant"]
    assert [answer["pipeline"] for answer in document["answers"]] == ["plain", "plain", "lookup"]
    assert document["answers"][0]["token_ids"] == document["answers"][1]["token_ids"]
    for said in (
        "tokens_out       4",
        "temperature         0.5",
        "*  lookup",
        "taken back: more",
        "loaded 1 turn from",
    ):
        assert said in done.err
    assert "/undo" in done.err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/retri", "there is no command `/retri`"),
        ("/undo", "there is no turn to take back"),
        ("/retry now", "`/retry` takes nothing after it"),
        ("/save", "`/save` needs a file"),
        ("/load /no/such/file", "`/no/such/file` cannot be read: no such file or directory"),
        ("/spec fast", "there is no pipeline `fast`"),
        ("/set temperature", "`/set temperature` lacks a value"),
        ("/stats", "there is no answer yet"),
        ("/save a\0b", "`a\0b` cannot be opened: embedded null byte"),
        ("/save ~nobody-here/x", "`~nobody-here/x` cannot be written: no such file or directory"),
        (f"/load {'a' * 300}", f"`{'a' * 57}...` cannot be opened: file name too long"),
    ],
)
def test_a_wrong_command_in_a_script_is_said_and_passed_over(line: str, message: str, call, model) -> None:
    options = ("--quiet", "--max-new-tokens", "4", "--json")
    done = call("chat", model, *options, stdin=f"{line}\nhello\n/set nothing 1\nagain\n")
    assert done.code in (2, 6)
    assert done.err.startswith(f"error: {message}")
    assert "there is no setting `nothing`" in done.err
    assert [turn["content"] for turn in json.loads(done.out)["messages"][::2]] == ["hello", "again"]


def test_the_exit_code_of_a_script_is_that_of_its_first_error(call, model) -> None:
    options = ("--quiet", "--max-new-tokens", "4")
    assert call("chat", model, *options, stdin="/spec sequence\nhello\n/retri\n").code == 6
    done = call("chat", model, *options, "--context", "60", stdin=f"hello\n{'a' * 90}\n/reset\nhello\n")
    assert (done.code, len(done.out.splitlines())) == (2, 2)
    assert "the context holds 60" in done.err


def test_a_base_model_says_how_to_chat_with_it(call, tmp_path) -> None:
    folder = write_model(tmp_path / "base", tiny_config())
    write_tokenizer(folder, chat_template=None)
    done = call("chat", folder, "--quiet", stdin="hello\n")
    assert done == (
        2,
        "",
        "error: the model has no chat template\n\nhint: base model: use --raw or --chat-template FILE\n",
    )
    assert call("chat", folder, "--quiet", "--raw", "--max-new-tokens", "2", stdin="hello\n").code == 0
    (tmp_path / "template.jinja").write_text("{% for m in messages %}{{ m['content'] }}\n{% endfor %}")
    arguments = ["--chat-template", tmp_path / "template.jinja", "--max-new-tokens", "2", "--quiet"]
    assert call("chat", folder, *arguments, stdin="hello\n").code == 0
