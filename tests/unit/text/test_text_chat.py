"""Chat messages as tokens: what is appended turn by turn equals what the template renders at once."""

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers.tokenization_utils_tokenizers import TokenizersBackend

from drumroll.errors import ModelError
from drumroll.text.chat import continuation_ids, messages_to_ids, reply_ids
from drumroll.text.tokenizer import Tokenizer

CHATML = (
    "{%- if messages[0]['role'] != 'system' %}<|im_start|>system\nYou are kind.<|im_end|>\n{% endif %}"
    "{%- for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] | trim }}<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HEADERS = (
    "{{- bos_token }}{%- for message in messages %}"
    "<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n{{ message['content'] }}<|eot_id|>{% endfor %}"
    "{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
STRICT = (
    "{%- for message in messages %}{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}[{{ message['role'] }}]{{ message['content'] }}<|im_end|>{% endfor %}"
    "{%- if add_generation_prompt %}[assistant]{% endif %}"
)
ONLY_LAST = "{{ messages[-1]['content'] }}"
SPECIAL = ["<bos>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
USER, AGAIN = {"role": "user", "content": "2+2?"}, {"role": "user", "content": "Sure?"}


@pytest.fixture
def make(tmp_path):
    def tokenizer(template, eos="<|im_end|>"):
        backend = Backend(models.BPE(vocab={c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        hf = TokenizersBackend(tokenizer_object=backend, bos_token="<bos>", eos_token=eos, extra_special_tokens=SPECIAL)
        hf.chat_template = template
        hf.save_pretrained(tmp_path)
        return Tokenizer(tmp_path)

    return tokenizer


def shown(tokenizer, ids):
    return tokenizer.hf.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize(("template", "eos"), [(CHATML, "<|im_end|>"), (HEADERS, "<|eot_id|>"), (STRICT, "<|im_end|>")])
@pytest.mark.parametrize("ended", [True, False])
def test_turn_by_turn_equals_the_whole_conversation(make, template, eos, ended):
    """A reply that the policy ended itself, and one that was cut off: the turn is closed exactly once."""
    tokenizer = make(template, eos)
    prompt = messages_to_ids(tokenizer, [USER])
    reply = tokenizer.encode("Four!" + (eos if ended else ""))
    between = continuation_ids(tokenizer, [AGAIN], last_token=reply[-1])
    whole = messages_to_ids(tokenizer, [USER, {"role": "assistant", "content": "Four!"}, AGAIN])
    assert prompt + reply + between == whole


def test_sampled_tokens_are_kept_even_where_the_template_would_render_others(make):
    tokenizer = make(CHATML)
    between = continuation_ids(tokenizer, [AGAIN])
    assert shown(tokenizer, between) == "<|im_end|>\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"


def test_tool_results_and_several_messages_continue_too(make):
    tokenizer = make(CHATML)
    tools = [{"role": "tool", "content": "4"}, AGAIN]
    text = shown(tokenizer, continuation_ids(tokenizer, tools, last_token=tokenizer.eos_ids[0]))
    assert text == "\n<|im_start|>tool\n4<|im_end|>\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"


def test_the_prompt_is_rendered_without_a_second_bos(make):
    tokenizer = make(HEADERS, "<|eot_id|>")
    ids = messages_to_ids(tokenizer, [USER])
    assert ids.count(tokenizer.hf.bos_token_id) == 1
    assert shown(tokenizer, ids).endswith("<|start_header_id|>assistant<|end_header_id|>\n\n")
    assert not shown(tokenizer, messages_to_ids(tokenizer, [USER], add_generation_prompt=False)).endswith("\n\n")


@pytest.mark.parametrize(("template", "eos"), [(CHATML, "<|im_end|>"), (HEADERS, "<|eot_id|>")])
def test_a_demonstration_ends_where_the_template_ends_the_turn(make, template, eos):
    tokenizer = make(template, eos)
    assert shown(tokenizer, reply_ids(tokenizer, "Four!")) == "Four!" + eos


def test_no_template_says_what_to_do(make):
    with pytest.raises(ModelError, match=r"no chat template.*plain text.*chat_template.jinja"):
        messages_to_ids(make(None), [USER])


def test_what_a_template_refuses_is_told(make):
    with pytest.raises(ModelError, match=r"refuses messages of the roles user, user: roles must alternate"):
        messages_to_ids(make(STRICT), [USER, AGAIN])


def test_a_template_that_hides_replies_cannot_continue(make):
    with pytest.raises(ModelError, match="does not show an assistant's earlier replies"):
        continuation_ids(make(ONLY_LAST), [AGAIN])
