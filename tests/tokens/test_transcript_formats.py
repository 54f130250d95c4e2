"""How a template is found, refused, cached and undone, and tokenizers that are not byte-level BPE."""

import copy
import gc
import weakref
from typing import Any

import pytest
from recorded_chat import opening, record, tokenizer_of, user
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast

from agentsgym.errors import ConfigError, TemplateError
from agentsgym.testing import chat_tokenizer
from agentsgym.tokens.transcript import ChatFormat, Transcript

CHATML = tokenizer_of("chatml").chat_template


@pytest.mark.parametrize(
    ("template", "complaint"),
    [
        (
            CHATML.replace("message.content", "(message.content if message.role == 'user' else '')"),
            "agent's answer once",
        ),
        (
            CHATML.replace("message.content", "message.content ~ message.content"),
            r"it repeats the content of message 0 \(user\)",
        ),
        (CHATML.replace("message.content", "message.content | tojson"), "agent's answer once"),
        (
            CHATML.replace("message.content", "message.content | upper"),
            r"it leaves out, moves or rewrites the content of message 0 \(user\)",
        ),
        (CHATML.replace("message.content", "message.content | e"), r"it changes the content of message 0 \(user\)"),
        (
            CHATML.replace("message.content", "message.content.lstrip('\\n')"),
            r"it changes the content of message 0 \(user\)",
        ),
        (
            CHATML.replace("message.content", "message.content | indent"),
            r"it changes the content of message 0 \(user\)",
        ),
        (CHATML.replace("message.role", "message.role ~ loop.index0"), "different text around user in the second turn"),
        ("{{ raise_exception('no conversations here') }}", "no conversations here"),
    ],
)
def test_a_template_that_cannot_be_kept_exact_is_refused_with_a_reason(template: str, complaint: str) -> None:
    tokenizer = chat_tokenizer("chatml")
    tokenizer.chat_template = template
    with pytest.raises(TemplateError, match=complaint) as error:
        ChatFormat.of(tokenizer)
    assert "set tokenizer.chat_template" in str(error.value)


def test_a_role_that_the_template_refuses_is_named() -> None:
    tokenizer = chat_tokenizer("chatml")
    tokenizer.chat_template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML
    )
    transcript = Transcript(ChatFormat.of(tokenizer))
    with pytest.raises(TemplateError, match=r"cannot render a conversation of system, user: .*no system"):
        transcript.observe(opening("play", "go"))
    assert (transcript.messages, transcript.token_ids) == ([], [])
    transcript.observe([user("go")])
    assert transcript.messages == [user("go")]


@pytest.mark.parametrize(
    ("change", "rewrites"),
    [
        ("{{ message.content }}", False),
        ("{{ message.content | trim }}", True),
        ("{{ message.content.split('</think>')[-1] }}", True),
        ("{{ message.content if loop.last or message.role == 'user' else message.content | trim }}", True),
    ],
)
def test_templates_that_rewrite_history_are_distinguished(change: str, rewrites: bool) -> None:
    tokenizer = chat_tokenizer("chatml")
    tokenizer.chat_template = CHATML.replace("{{ message.content }}", change)
    assert ChatFormat.of(tokenizer).rewrites_history is rewrites


class CountingTokenizer(PreTrainedTokenizerFast):
    renders = 0

    def apply_chat_template(self, *args: Any, **kwargs: Any) -> Any:
        CountingTokenizer.renders += 1
        return super().apply_chat_template(*args, **kwargs)


def test_no_template_runs_once_the_shapes_are_known() -> None:
    model = chat_tokenizer("chatml")
    tokenizer = CountingTokenizer(tokenizer_object=model.backend_tokenizer, eos_token="<|im_end|>", pad_token="<|pad|>")
    tokenizer.chat_template = model.chat_template
    conversation = ("system", "question", [("answer", "observation")] * 3)
    record(tokenizer, conversation)
    assert CountingTokenizer.renders > 0
    CountingTokenizer.renders = 0
    for _ in range(3):
        record(tokenizer, conversation)
    assert CountingTokenizer.renders == 0


def test_a_format_is_found_once_again_when_the_template_changes_and_leaks_nothing() -> None:
    tokenizer = chat_tokenizer("chatml")
    first = ChatFormat.of(tokenizer)
    assert ChatFormat.of(tokenizer) is first
    tokenizer.chat_template = tokenizer_of("trimming").chat_template
    assert ChatFormat.of(tokenizer) is not first
    assert ChatFormat.of(tokenizer).rewrites_history
    assert not first.rewrites_history
    gone = weakref.ref(tokenizer)
    del tokenizer, first
    gc.collect()
    assert gone() is None


def test_the_users_tokenizer_is_left_as_it_was() -> None:
    tokenizer = chat_tokenizer("chatml")
    before = copy.copy(tokenizer.__dict__)
    ChatFormat.of(tokenizer).encode("<|im_end|>")
    assert tokenizer.__dict__ == before
    assert tokenizer("<|im_end|>")["input_ids"] == [tokenizer.eos_token_id]


@pytest.mark.parametrize("observation", ["hi", "  hi  ", "", " \n"])
def test_control_tokens_that_swallow_whitespace_do_so_here_too(observation: str) -> None:
    tokenizer = chat_tokenizer("chatml")
    swallowing = [AddedToken(token, special=True, rstrip=True) for token in ("<|user|>", "<|assistant|>", "<|end|>")]
    tokenizer.add_tokens([*swallowing, AddedToken("<|left|>", special=True, lstrip=True)], special_tokens=True)
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{{ '<|left|>' if m.role == 'user' else '<|end|>' }}\n"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    )
    transcript = record(tokenizer, (None, observation, [("left", observation), ("right", observation)]))
    whole = tokenizer.apply_chat_template(
        transcript.messages, tokenize=True, add_generation_prompt=True, return_dict=False
    )
    assert transcript.token_ids == whole


def test_a_word_mark_belongs_to_the_very_first_piece_only() -> None:
    mark = "▁"
    vocab = {token: n for n, token in enumerate(["<unk>", mark, "<s>", "<e>", *"abcdefghijklmnopqrstuvwxyz[]"])}
    raw = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    raw.decoder = decoders.Metaspace(prepend_scheme="first")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<e>", pad_token="<unk>")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '[' + m.content + ']' if m.role == 'user' else m.content + '<e>' }}{% endfor %}"
    )
    transcript = record(tokenizer, (None, "go on", [("left", "and"), ("right turn", "now")]))
    whole = tokenizer.apply_chat_template(
        transcript.messages, tokenize=True, add_generation_prompt=True, return_dict=False
    )
    assert transcript.token_ids == whole
    assert tokenizer.convert_ids_to_tokens(whole)[:2] == [mark, "["]


class LetterTokenizer(PreTrainedTokenizer):
    """A tokenizer in plain Python: one token a character."""

    def __init__(self, **kwargs: Any) -> None:
        self._letters = {chr(code): code for code in range(128)}
        super().__init__(**kwargs)

    vocab_size = 128

    def get_vocab(self) -> dict[str, int]:
        return dict(self._letters)

    def _tokenize(self, text: str, **kwargs: Any) -> list[str]:
        return list(text)

    def _convert_token_to_id(self, token: str) -> int:
        return self._letters.get(token, 0)

    def _convert_id_to_token(self, index: int) -> str:
        return chr(index)


def test_a_tokenizer_in_plain_python_keeps_control_looking_text_as_text() -> None:
    tokenizer = LetterTokenizer(eos_token="<|im_end|>", pad_token="<|pad|>", extra_special_tokens=["<|im_start|>"])
    tokenizer.chat_template = CHATML
    assert not tokenizer.is_fast
    harmless = record(tokenizer, ("s", "q", [("a", "b")]))
    whole = tokenizer.apply_chat_template(
        harmless.messages, tokenize=True, add_generation_prompt=True, return_dict=False
    )
    assert harmless.token_ids == whole
    spoofed = record(tokenizer, ("s", "q<|im_end|>", [("a", "b")]))
    assert spoofed.token_ids.count(tokenizer.eos_token_id) == whole.count(tokenizer.eos_token_id)
    assert [*map(ord, "q<|im_end|>")] == [i for i in spoofed.token_ids if i < 128][len("system\ns\nuser\n") :][:11]


def test_the_vocabulary_reaches_to_the_last_id() -> None:
    tokenizer = chat_tokenizer("chatml")
    assert ChatFormat.of(tokenizer).vocabulary_size == len(tokenizer)
    with_a_hole = Tokenizer(models.WordLevel({"<pad>": 0, "a": 1, "b": 40}, unk_token="<pad>"))
    assert ChatFormat.of(PreTrainedTokenizerFast(tokenizer_object=with_a_hole)).vocabulary_size == 41
    letters = LetterTokenizer(eos_token="<e>", pad_token="<p>")
    assert ChatFormat.of(letters).vocabulary_size == 130


def test_decode_leaves_control_tokens_out() -> None:
    chat_format = ChatFormat.of(tokenizer_of("chatml"))
    assert chat_format.decode([*chat_format.encode("left <|im_end|>"), chat_format.end_of_turn_id]) == "left <|im_end|>"


def test_an_unknown_kind_of_chat_tokenizer_is_named() -> None:
    with pytest.raises(ConfigError, match="did you mean 'chatml'"):
        chat_tokenizer("chatmll")


@pytest.mark.parametrize("kind", ["chatml", "llama3", "default_system", "trimming", "inst", "none"])
def test_chat_tokenizers_have_a_pad_token_of_their_own(kind: Any) -> None:
    tokenizer = tokenizer_of(kind)
    assert tokenizer.pad_token_id not in {None, tokenizer.eos_token_id}
    assert (tokenizer.chat_template is None) is (kind == "none")


def test_a_tokenizer_without_a_template_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = chat_tokenizer("none")
    tokenizer.name_or_path = "tiny/base"
    with caplog.at_level("WARNING", logger="agentsgym"):
        for options in ({}, {"append": False}, {"guard_added_tokens": True}):
            ChatFormat.of(tokenizer, **options)
        ChatFormat.of(chat_tokenizer("chatml"))
    [message] = [logged.getMessage() for logged in caplog.records]
    assert "the tokenizer 'tiny/base' has no chat template" in message
    assert message.endswith("set tokenizer.chat_template if the model has one")
