"""Text behind text: what a reply says does not depend on where it was cut off from its prompt."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer as Core
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from drumroll.text.renderer import Renderer
from drumroll.text.tokenizer import Tokenizer


@pytest.fixture
def renderer(tmp_path: Path) -> Renderer:
    """A tokenizer in the manner of Llama: a space belongs to the word behind it, and the first one of a text is swallowed."""
    words = ["</s>", "▁One", "▁day,", "▁she", "▁saw", "▁STOP", "▁more"]
    core = Core(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="</s>"))
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    core.decoder = decoders.Metaspace()
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>").save_pretrained(tmp_path)
    return Renderer(Tokenizer(tmp_path))


def test_a_reply_keeps_the_space_that_parts_it_from_its_prompt(renderer: Renderer) -> None:
    prompt, text = renderer.first("One day,", None)
    assert text + renderer.reply_text([3, 4, 0], (), prompt) == "One day, she saw"
    assert renderer.reply_text([3, 4], ()) == "she saw"


def test_a_reply_ends_before_its_stop_string(renderer: Renderer) -> None:
    assert renderer.reply_text([3, 5, 6], ("STOP", "more"), [1]) == " she "


def test_nothing_to_show_is_an_error(renderer: Renderer) -> None:
    with pytest.raises(ValueError, match="neither `prompt` nor `messages`"):
        renderer.first(None, None)
    with pytest.raises(ValueError, match="not done"):
        renderer.next(None, None, last_token=3)
