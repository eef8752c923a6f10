"""The reward for instruction following, on made-up tasks and on all of IFEval."""

import json
from functools import cache
from pathlib import Path

import pytest
from replies import attempt as attempt_at

from drumroll.config.models import RewardConfig
from drumroll.registry import REGISTRY
from drumroll.rewards.constraints import CONSTRAINTS, check
from drumroll.rewards.instructions import Instructions, loose_forms
from drumroll.types import Task

IFEVAL = Path(__file__).parents[3] / ".." / "shared" / "data" / "ifeval.jsonl"
needs_ifeval = pytest.mark.skipif(not IFEVAL.exists(), reason="IFEval is not here: shared/data/ifeval.jsonl")

NO_COMMA = ("punctuation:no_comma", {})
TWO_BULLETS = ("detectable_format:number_bullet_lists", {"num_bullets": 2})
SMALL = ("change_case:english_lowercase", {})


def reward(**options):
    return Instructions(REGISTRY.lookup("reward", "instructions").schema(RewardConfig)(kind="instructions", **options))


def task(*constraints):
    return Task("t-1", prompt="Write.", data={"instruction_id_list": [i for i, _ in constraints], "kwargs": [k for _, k in constraints]})


@pytest.mark.parametrize(
    ("reply", "everything", "share"),
    [("* a\n* b", 1.0, 1.0), ("* A\n* b", 0.0, 2 / 3), ("a, b", 0.0, 1 / 3), ("A, b", 0.0, 0.0), ("", 0.0, 0.0)],
)
def test_all_or_their_share(reply, everything, share):
    attempt = attempt_at(task(NO_COMMA, TWO_BULLETS, SMALL), reply)
    assert reward()(attempt) == everything
    assert reward(score="share")(attempt) == share


@pytest.mark.parametrize(
    ("reply", "strict", "loose"),
    [
        ("* a\n* b", 1.0, 1.0),
        ("Sure, here it is:\n* a\n* b", 0.0, 1.0),
        ("* a\n* b\nBye, friend.", 0.0, 1.0),
        ("Sure, here:\n* a\n* b\nBye, friend.", 0.0, 1.0),
        ("* a\nno, none\n* b", 0.0, 0.0),
        ("Sure, here it is.", 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_loose_forgives_the_lines_around(reply, strict, loose):
    attempt = attempt_at(task(NO_COMMA, TWO_BULLETS), reply)
    assert reward()(attempt) == strict
    assert reward(loose=True)(attempt) == loose


def test_loose_forgives_asterisks():
    attempt = attempt_at(task(("detectable_format:constrained_response", {})), "My answer is **yes**.")
    assert reward()(attempt) == 0.0
    assert reward(loose=True)(attempt) == 1.0


def test_loose_forms():
    assert loose_forms("a\n*b*\nc") == ["a\n*b*\nc", "a\nb\nc", "*b*\nc", "b\nc", "a\n*b*", "a\nb", "*b*", "b"]
    assert loose_forms("a") == ["a", ""]


def test_other_columns():
    subject = Task("t-1", data={"ids": ["punctuation:no_comma"], "args": [{"num_words": None}]})
    judge = reward(ids_field="ids", kwargs_field="args")
    judge.check_task(subject)
    assert judge(attempt_at(subject, "fine")) == 1.0


@pytest.mark.parametrize(
    ("ids", "kwargs", "message"),
    [
        (["punctuation:no_commas"], [{}], "no constraint 'punctuation:no_commas'. Did you mean 'punctuation:no_comma'?"),
        (["punctuation:no_comma"], [{"num": 1}], "'punctuation:no_comma'.*num: Extra inputs"),
        (["punctuation:no_comma"], [], r"'kwargs' holds \[\]: a list of 1 mappings was expected"),
        (["punctuation:no_comma"], ["{}"], "'kwargs' holds"),
        (["punctuation:no_comma"], None, "'kwargs' holds None"),
        ([None], [{}], r"'instruction_id_list' holds \[None\]"),
        ([], [], r"'instruction_id_list' holds \[\]"),
        ("punctuation:no_comma", [{}], "'instruction_id_list' holds 'punctuation:no_comma'"),
    ],
)
def test_tasks_that_cannot_be_used(ids, kwargs, message):
    subject = Task("t-1", data={"instruction_id_list": ids, "kwargs": kwargs})
    with pytest.raises(ValueError, match=message):
        reward().check_task(subject)
    with pytest.raises(ValueError, match=message):
        reward()(attempt_at(subject, "A reply."))


# IFEval: for every row a reply that is put together from what its constraints ask for, and replies that break each of them.

LANGUAGES = {
    "ar": "ذهب الولد إلى المدرسة في الصباح ثم عاد إلى البيت مع أصدقائه",
    "bg": "Днес времето е много хубаво и ние отиваме на разходка в парка",
    "bn": "আজ আবহাওয়া খুব সুন্দর এবং আমরা পার্কে হাঁটতে যাচ্ছি",
    "de": "Heute ist das Wetter sehr schön und wir gehen im Park spazieren",
    "fa": "امروز هوا بسیار خوب است و ما برای پیاده روی به پارک می رویم",
    "fi": "Tänään sää on erittäin kaunis ja menemme puistoon kävelylle",
    "gu": "આજે હવામાન ખૂબ સરસ છે અને અમે બગીચામાં ફરવા જઈએ છીએ",
    "hi": "आज मौसम बहुत अच्छा है और हम पार्क में टहलने जा रहे हैं",
    "it": "Oggi il tempo è molto bello e andiamo a fare una passeggiata nel parco",
    "kn": "ಇಂದು ಹವಾಮಾನ ತುಂಬಾ ಚೆನ್ನಾಗಿದೆ ಮತ್ತು ನಾವು ಉದ್ಯಾನಕ್ಕೆ ಹೋಗುತ್ತಿದ್ದೇವೆ",
    "ko": "오늘은 날씨가 매우 좋아서 우리는 공원으로 산책하러 갑니다",
    "mr": "आज हवामान खूप छान आहे आणि आम्ही उद्यानात फिरायला जात आहोत",
    "ne": "आज मौसम धेरै राम्रो छ र हामी पार्कमा घुम्न जाँदैछौं",
    "pa": "ਅੱਜ ਮੌਸਮ ਬਹੁਤ ਵਧੀਆ ਹੈ ਅਤੇ ਅਸੀਂ ਪਾਰਕ ਵਿੱਚ ਸੈਰ ਕਰਨ ਜਾ ਰਹੇ ਹਾਂ",
    "pt": "Hoje o tempo está muito bonito e nós vamos passear no parque com as crianças",
    "ru": "Сегодня очень хорошая погода и мы идём гулять в парк",
    "sw": "Leo hali ya hewa ni nzuri sana na tunakwenda kutembea kwenye bustani",
    "ta": "இன்று வானிலை மிகவும் நன்றாக உள்ளது நாங்கள் பூங்காவிற்கு செல்கிறோம்",
    "te": "ఈరోజు వాతావరణం చాలా బాగుంది మేము పార్కుకు నడకకు వెళ్తున్నాము",
    "th": "วันนี้อากาศดีมากและเรากำลังจะไปเดินเล่นที่สวนสาธารณะ",
    "ur": "آج موسم بہت اچھا ہے اور ہم پارک میں سیر کے لیے جا رہے ہیں",
    "vi": "Hôm nay thời tiết rất đẹp và chúng tôi đi dạo trong công viên",
}


# The reply has to begin with a request in which a word or comma stands that the reply must not hold.
CONTRADICTORY = {374, 1627, 3369, 3371, 3718}


@cache
def rows():
    return [json.loads(line) for line in IFEVAL.read_text().splitlines()]


def constraints_of(row):
    return list(zip(row["instruction_id_list"], row["kwargs"], strict=True))


def satisfying(constraints):
    """A reply, hardly readable, that satisfies all of the constraints."""

    def ask(name):
        return [kwargs for constraint_id, kwargs in constraints if constraint_id.endswith(f":{name}")]

    word = harmless_word(ask)
    body = "".join(LANGUAGES[k["language"]] * 4 + "\n" for k in ask("response_language")) or f"{word} "
    body += "".join(f"<<{word}>> " for _ in ask("title"))
    body += "".join(" ".join(k["keywords"]) + " " for k in ask("existence"))
    body += "".join(f"{k['keyword']} " * k["frequency"] for k in ask("frequency") if k["relation"] == "at least")
    body += "".join(k["letter"] * k["let_frequency"] + " " for k in ask("letter_frequency") if k["let_relation"] == "at least")
    body += "".join("XX " * k["capital_frequency"] for k in ask("capital_word_frequency") if k["capital_relation"] == "at least")
    body += "".join(f"[{word}] " * k["num_placeholders"] for k in ask("number_placeholders"))
    body += "".join(f"*{word}* " * k["num_highlights"] for k in ask("number_highlighted_sections"))
    body += "".join(f"{word}. " * k["num_sentences"] for k in ask("number_sentences") if k["relation"] == "at least")
    body += "".join(f"{word} " * k["num_words"] for k in ask("number_words") if k["relation"] == "at least")
    body += "".join("\nMy answer is maybe." for _ in ask("constrained_response"))
    for k in ask("multiple_sections"):
        body += "".join(f"\n{k['section_spliter']} {number} {word}" for number in range(1, k["num_sections"] + 1))
    for k in ask("number_bullet_lists"):
        body += f"\n* {word}" * k["num_bullets"]
    for k in ask("number_paragraphs"):
        body += f"\n***\n{word}" * (k["num_paragraphs"] - 1)
    for k in ask("nth_paragraph_first_word"):
        paragraphs = [body, *[word] * (k["num_paragraphs"] - 1)]
        paragraphs[k["nth_paragraph"] - 1] = f"{k['first_word']} {paragraphs[k['nth_paragraph'] - 1]}"
        body = "\n\n".join(paragraphs)
    body += "".join(f"\n******\n{word} {word} {word}" for _ in ask("two_responses"))
    body = "".join(f"{k['prompt_to_repeat']}\n" for k in ask("repeat_prompt")) + body
    body += "".join(f"\n{k['postscript_marker']} {word}" for k in ask("postscript"))
    body += "".join(f"\n{k['end_phrase']}" for k in ask("end_checker"))
    body = json.dumps({word: body}, ensure_ascii=False) if ask("json_format") else body
    body = f'"{body}"' if ask("quotation") else body
    body = body.upper() if ask("english_capital") else body
    return body.lower() if ask("english_lowercase") else body


def harmless_word(ask):
    """One without the letters and words that the constraints limit."""
    letters = [k["letter"] for k in ask("letter_frequency") if k["let_relation"] == "less than"]
    return next(word for word in ("zebra", "fly", "dusk") if not any(letter in word for letter in letters))


VIOLATING = {
    "existence": lambda k: "Something else.",
    "frequency": lambda k: f"{k['keyword']} " * (k["frequency"] - (k["relation"] == "at least")) + ".",
    "forbidden_words": lambda k: f"Well: {k['forbidden_words'][-1].upper()}!",
    "letter_frequency": lambda k: k["letter"] * (k["let_frequency"] - (k["let_relation"] == "at least")) + "-",
    "response_language": lambda k: "The weather is fine today, and we all walk through the park.",
    "number_sentences": lambda k: "So it is. " * (k["num_sentences"] - (k["relation"] == "at least")),
    "number_words": lambda k: "so " * (k["num_words"] - (k["relation"] == "at least")),
    "number_paragraphs": lambda k: "so\n***\n" * k["num_paragraphs"] + "so",
    "nth_paragraph_first_word": lambda k: "so\n\n" * k["num_paragraphs"],
    "number_placeholders": lambda k: "[so]" * (k["num_placeholders"] - 1) + "(so)",
    "postscript": lambda k: f"So. {k['postscript_marker']}",
    "number_bullet_lists": lambda k: "* so\n" * (k["num_bullets"] + 1),
    "constrained_response": lambda k: "My answer is yes. My answer is no.",
    "number_highlighted_sections": lambda k: "*so* " * (k["num_highlights"] - 1) + "so",
    "multiple_sections": lambda k: f"{k['section_spliter']} 1 so\n" * k["num_sections"],
    "json_format": lambda k: '{"so": 1} so',
    "title": lambda k: "# Title",
    "two_responses": lambda k: "so ****** so",
    "repeat_prompt": lambda k: f"So: {k['prompt_to_repeat']} So.",
    "end_checker": lambda k: f"{k['end_phrase']} So.",
    "quotation": lambda k: '"So" it is.',
    "capital_word_frequency": lambda k: "XX " * (k["capital_frequency"] - (k["capital_relation"] == "at least")) + "so",
    "english_capital": lambda k: "NEARLy",
    "english_lowercase": lambda k: "nearlY",
    "no_comma": lambda k: "so, so",
}


@needs_ifeval
def test_every_row_can_be_used():
    assert len(rows()) == 541
    judge = reward()
    for row in rows():
        judge.check_task(Task(str(row["key"]), data=row))
    assert {constraint_id for row in rows() for constraint_id in row["instruction_id_list"]} == set(CONSTRAINTS)


@needs_ifeval
def test_every_row_can_be_satisfied_but_those_that_contradict_themselves():
    strict, loose = reward(), reward(loose=True)
    failed = set()
    for row in rows():
        attempt = attempt_at(Task(str(row["key"]), data=row), satisfying(constraints_of(row)))
        assert loose(attempt) == 1.0, row["key"]
        if strict(attempt) != 1.0:
            failed.add(row["key"])
    assert failed == CONTRADICTORY


@needs_ifeval
def test_every_constraint_of_every_row_can_be_satisfied_alone_and_violated():
    for row in rows():
        for constraint_id, kwargs in constraints_of(row):
            assert check(satisfying([(constraint_id, kwargs)]), constraint_id, kwargs), (row["key"], constraint_id)
            violation = VIOLATING[constraint_id.partition(":")[2]](kwargs)
            assert not check(violation, constraint_id, kwargs), (row["key"], constraint_id)
            assert reward()(attempt_at(Task(str(row["key"]), data=row), violation)) == 0.0


@needs_ifeval
def test_silence_satisfies_no_row():
    assert not any(reward(score="share", loose=True)(attempt_at(Task(str(row["key"]), data=row), " \n")) for row in rows())
