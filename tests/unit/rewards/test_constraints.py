"""Every constraint: replies that satisfy it, replies that nearly do, and odd ones."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumroll.errors import PluginError
from drumroll.rewards.constraints import CONSTRAINTS, check, language, parse
from drumroll.rewards.constraints.sentences import split_sentences
from drumroll.rewards.constraints.words import count_words


def at_least(**kwargs):
    return {"relation": "at least", **kwargs}


def less_than(**kwargs):
    return {"relation": "less than", **kwargs}


DRAGONS = {"keywords": ["dragon", "New York"]}
WAR = {"keyword": "war", "frequency": 2}
FORBIDDEN = {"forbidden_words": ["can", "ride"]}
HASHES = {"letter": "#", "let_frequency": 3}
OS = {"letter": "o", "let_frequency": 3}
THIRD_STARTS = {"num_paragraphs": 3, "nth_paragraph": 3, "first_word": "bonding"}
SECTIONS = {"section_spliter": "SECTION", "num_sections": 2}
REQUEST = {"prompt_to_repeat": "Write a poem.\nMake it short."}
FAREWELL = {"end_phrase": "Peace, friends!"}

CASES = {
    "keywords:existence": (
        DRAGONS,
        ["A Dragon in new york.", "NEW\nYORK has (dragon)s", "dragon-fire over New York", "뉴욕dragon은 New York에"],
        ["A dragon in York.", "dragons in New York", "snapdragon New York", "dragon New-York"],
    ),
    "keywords:frequency": (
        WAR | at_least(),
        ["war and war", "War! WAR!", "war war war", "war_war"],
        ["war", "warm wars award", "peace", "war warfare"],
    ),
    "keywords:frequency <": (WAR | less_than(), ["peace", "war", "war and warm wars"], ["war war", "War, WAR"]),
    "keywords:forbidden_words": (FORBIDDEN, ["A canoe has pride.", "I do", "12"], ["Can you?", "yes we CAN", "a ride.", "*ride*"]),
    "keywords:letter_frequency": (
        OS | {"let_relation": "at least"},
        ["ooo", "Oo, no!", "foo boO"],
        ["oo", "Oh no", "000", "xyz"],
    ),
    "keywords:letter_frequency <": (HASHES | {"let_relation": "less than"}, ["none", "# ##"[:3]], ["###", "#a #b #c #d"]),
    "language:response_language": (
        {"language": "de"},
        ["Das Wetter ist heute schön, und wir gehen an den See.", "DAS WETTER IST HEUTE SCHÖN, UND WIR GEHEN."],
        [
            "The weather is fine today and we go to the lake.",
            "Il fait beau aujourd'hui, nous allons au lac.",
            "天气很好。",
            "1 + 1 = 2",
            "?",
        ],
    ),
    "length_constraints:number_sentences": (
        at_least(num_sentences=3),
        ["One. Two! Three?", "One. Two. Three", "one. two. three. four.", "他来了。他走了！真的吗？"],
        ["One. Two.", "One, two, three", "Mr. A. Smith paid 3.50. Yes.", "One. Two. !!!", "Wait... what... now"],
    ),
    "length_constraints:number_sentences <": (
        less_than(num_sentences=3),
        ["One.", "One. Two.", "# Title\n\nOne. Two.", "E.g. Dr. No. Well... yes."],
        ["One. Two. Three.", "Is it? It is. Fine!"],
    ),
    "length_constraints:number_paragraphs": (
        {"num_paragraphs": 2},
        [
            "One\n***\nTwo",
            "One *** Two",
            "One\n\nstill one\n\n***\n\nTwo",
            "***\nOne\n***\nTwo\n***",
            '"One\n***\nTwo"',
            "*one*\n***\n**two**",
        ],
        ["One", "One\n\nTwo", "One\n***\nTwo\n***\nThree", "One\n***\n***\nTwo", "One\n******\nTwo", "a ***bold*** b", "One\n---\nTwo"],
    ),
    "length_constraints:number_words": (
        at_least(num_words=4),
        ["one two three four", "it's well-known - is it not", "今天很好", "मैं आज घर हूँ"],
        ["one two three", "one two three !!! — *", "one-two-three-four", "今天好"],
    ),
    "length_constraints:number_words <": (
        less_than(num_words=4),
        ["one", "one two three", "- one *** two"],
        ["one two three four", "a b c d e"],
    ),
    "length_constraints:nth_paragraph_first_word": (
        THIRD_STARTS,
        ["One.\n\nTwo.\n\nBonding is it.", 'a\n\n\n  \nb\nb\n\n"**bonding** c', "a\r\n\r\nb\r\n\r\nbonding's"],
        ["a\n\nbonding\n\nc", "a\n\nb\n\nc bonding", "a\n\nb\n\nbondings c", "a\n\nbonding", "a\n\nb\n\nbonding\n\nd", "a\nb\nbonding"],
    ),
    "detectable_content:number_placeholders": (
        {"num_placeholders": 2},
        ["[name] lives at [street 5]", "[a][b]", "[[name]] and [住所]", "[a] [b] [c]"],
        ["[name]", "(a) {b}", "[] [ ]", "[a [b", "[a\nb] [c]"],
    ),
    "detectable_content:postscript": (
        {"postscript_marker": "P.S."},
        ["Bye.\nP.S. Call me.", "Bye. p.s. call me", "**P.S.** Call me", "P. S. me"],
        ["Bye.", "Bye.\nP.S.", "P.P.S. Call me", "PS call me", "ships. call"],
    ),
    "detectable_content:postscript pps": (
        {"postscript_marker": "P.P.S"},
        ["Bye.\nP.P.S Call me.", "p.p.s. call me", "P.P.S: me"],
        ["P.S. Call me", "Bye. P.P.S.", "P.P.Special offer"],
    ),
    "detectable_format:number_bullet_lists": (
        {"num_bullets": 2},
        ["* a\n* b", "- a\n  + b", "Text\n* *a*\n\n* b\ntext", "* a\n***\n* b\n* * *\n---"],
        ["* a", "* a\n* b\n* c", "*a*\n*b*", "1. a\n2. b", "a * b\nc - d", "*\n*"],
    ),
    "detectable_format:constrained_response": (
        {},
        ["My answer is yes.", "Well. My answer is no.", "**My answer is maybe.** Who knows?"],
        ["yes", "My answer is yes", "my answer is yes.", "My answer is yes. My answer is no.", "My answer is perhaps."],
    ),
    "detectable_format:number_highlighted_sections": (
        {"num_highlights": 2},
        ["*a* and *b*", "**a** ***b***", "* *one two*\n* *three*", "*a* *b* *c*", "*é* *日本*"],
        ["*a*", "* a\n* b\n* c *", "2 * 3 * 4 * 5", "_a_ _b_", "*a\nb* *c\nd*", "** ** **", "***\na\n***"],
    ),
    "detectable_format:multiple_sections": (
        SECTIONS,
        [
            "SECTION 1\na\nSECTION 2\nb",
            "**Section 1**: a\n**Section 2**: b",
            "SECTION 1 a SECTION 2 b SECTION 3 c",
            "SECTION1 a SECTION 02 b",
        ],
        [
            "SECTION 1\na",
            "SECTION 1 a\nSECTION 1 b",
            "SECTION 1\nSECTION 2\n",
            "SECTION one a SECTION two b",
            "INTERSECTION 1 a SECTION 2 b",
        ],
    ),
    "detectable_format:json_format": (
        {},
        ['{"a": [1, 2.5, null]}', " [] \n", '```json\n{"a": 1}\n```', "```\n[1]\n```", '```JSON {"a": "```"} ```', '{"ключ": "ü"}'],
        ["{'a': 1}", '{"a": 1,}', 'Here: {"a": 1}', '{"a": 1}\nDone.', "NaN", "[NaN]", '"text"', "42", "[" * 100_000, "```json\n```"],
    ),
    "detectable_format:title": (
        {},
        ["<<A title>>\nText", "text <<T>> text", "**<<Ünï>>**", "<<<x>>>"],
        ["<title>", "<<>>", "<< >>", "<<a\nb>>", "«title»", "<<title>"],
    ),
    "combination:two_responses": (
        {},
        ["a\n******\nb", "******\na ****** b\n******", "a\n*******\nb", '"yes\n******\nno"'],
        [
            "a",
            "a\n***\nb",
            "a\n*****\nb",
            "a\n******\nA!",
            "a\n******",
            '"a\n******\na"',
            "a\n******\nb\n******\nc",
            "a\n******\n******\nb",
        ],
    ),
    "combination:repeat_prompt": (
        REQUEST,
        ["Write a poem.\nMake it short.\n\nRoses are red.", "write a poem. make it short. Roses"],
        [
            "Roses are red.",
            "Write a poem.\nMake it short.",
            "Sure! Write a poem.\nMake it short.\nRoses",
            "Write a poem. Make it long. Roses",
        ],
    ),
    "startend:end_checker": (
        FAREWELL,
        ["Bye. Peace, friends!", "PEACE, FRIENDS!", '"Bye. Peace, friends!"', "Bye.\nPeace,\nfriends!  \n"],
        ["Peace, friends! Bye.", "Peace friends!", "Peace, friends", "Unpeace, friends!", "Peace, friends!!"],
    ),
    "startend:quotation": (
        {},
        ['"All of it."', ' "a\n\nb" \n', "“Curly.”", '"a" and "b"'],
        ["none", '"open', 'close"', "'single'", '"', '""', 'He said "hi".', "«no»"],
    ),
    "change_case:capital_word_frequency": (
        {"capital_relation": "at least", "capital_frequency": 2},
        ["NASA and ESA", "I AM", "WELL-KNOWN *FACT*", "ÄRGER ÜBER"],
        ["NASA", "Nasa Esa", "NASA-like eSA", "12 34"],
    ),
    "change_case:capital_word_frequency <": (
        {"capital_relation": "less than", "capital_frequency": 2},
        ["none", "NASA", "Every Word Is Titled", "NON-STOP"],
        ["NASA ESA", "NON STOP"],
    ),
    "change_case:english_capital": ({}, ["ALL OF IT, 24/7!", "É", "**A**"], ["All", "ALL OF iT", "123", "天气", "ß"]),
    "change_case:english_lowercase": ({}, ["all of it, 24/7!", "é", "naïve"], ["All", "all of It", "123", "天气"]),
    "punctuation:no_comma": ({}, ["None here; none there.", "1.000"], ["a, b", "1,000", "天气，很好", "نعم، لا", ","]),
}


def replies(which):
    return [(name.split()[0], case[0], reply) for name, case in CASES.items() for reply in case[which]]


@pytest.mark.parametrize(("constraint_id", "kwargs", "reply"), replies(1))
def test_satisfied(constraint_id, kwargs, reply):
    assert check(reply, constraint_id, kwargs)


@pytest.mark.parametrize(("constraint_id", "kwargs", "reply"), replies(2))
def test_not_satisfied(constraint_id, kwargs, reply):
    assert not check(reply, constraint_id, kwargs)


def test_every_constraint_has_cases():
    assert {name.split()[0] for name in CASES} == set(CONSTRAINTS)
    assert len(CONSTRAINTS) == 25


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("blank", ["", " ", "\n\t\n"])
def test_a_blank_reply_satisfies_nothing(name, blank):
    assert not check(blank, name.split()[0], CASES[name][0])


@given(reply=st.text(), name=st.sampled_from(sorted(CASES)))
def test_every_text_gets_a_verdict(reply, name):
    assert check(reply, name.split()[0], CASES[name][0]) in (True, False)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    "unit", [".", ". ", "<", "<<a", "[", "[a", "*", "*a", "* ", "- ", '."', "\n", "```a", "P.", "war ", "a" * 50, "  a"]
)
def test_long_monotonous_replies_get_a_verdict(name, unit):
    """A pattern that goes over the same text again and again would not come back from these."""
    assert check(unit * (200_000 // len(unit)), name.split()[0], CASES[name][0]) in (True, False)


@given(words=st.lists(st.sampled_from(["word", "it's", "x1", "well-known", "ünï"]), min_size=1, max_size=30), number=st.integers(1, 30))
def test_at_least_and_less_than_are_opposites(words, number):
    reply = " ".join(words)
    at_least_so_many = check(reply, "length_constraints:number_words", at_least(num_words=number))
    assert at_least_so_many == (len(words) >= number)
    assert at_least_so_many != check(reply, "length_constraints:number_words", less_than(num_words=number))


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("Dr. Li paid 3.50. Why?", ["Dr. Li paid 3.50.", "Why?"]),
        ("all small. two of them.", ["all small.", "two of them."]),
        ("ALL CAPITALS. MRS. X WON.", ["ALL CAPITALS.", "MRS. X WON."]),
        ("See example.com or v1.2.3. Good.", ["See example.com or v1.2.3.", "Good."]),
        ("Tea, milk, etc. are here, etc. All good.", ["Tea, milk, etc. are here, etc.", "All good."]),
        ("At 5 p.m. we met. It was 6 p.m. We left.", ["At 5 p.m. we met.", "It was 6 p.m.", "We left."]),
        ("J. R. Smith of the U.S. Army. So do I. Yes.", ["J. R. Smith of the U.S. Army.", "So do I.", "Yes."]),
        ("No. 5 on Jan. 3 is it. I said no. Really.", ["No. 5 on Jan. 3 is it.", "I said no.", "Really."]),
        ("Well... maybe… not. Well... Yes.", ["Well... maybe… not.", "Well...", "Yes."]),
        ('"Stop!" he said. "Go." She ran. (He did not.) Fine.', ['"Stop!" he said.', '"Go."', "She ran.", "(He did not.)", "Fine."]),
        ("1. One thing\n2. Two things.\na. Sub", ["1. One thing\n2. Two things.", "a. Sub"]),
        ("**Bold.** Plain?! *Yes.*", ["**Bold.**", "Plain?!", "*Yes.*"]),
        ("# Title\n\nText here.", ["# Title\n\nText here."]),
        ("वह गया। मैं आया।", ["वह गया।", "मैं आया।"]),
        ("他说：“好。”走了。", ["他说：“好。”", "走了。"]),
        ("Hi 🙂. Bye", ["Hi 🙂.", "Bye"]),
        ("... !!! ?", []),
        ("", []),
    ],
)
def test_sentences(text, sentences):
    assert split_sentences(text) == sentences


@given(st.lists(st.sampled_from(["It rains.", "Why not?", "Go on!", "She has 3.5 of them.", "Mr. Fox left."]), max_size=20))
def test_sentences_add_up(sentences):
    assert split_sentences(" ".join(sentences)) == sentences


@given(st.text(alphabet=st.characters(codec="ascii")))
def test_sentences_keep_all_words(text):
    assert count_words(" ".join(split_sentences(text))) == count_words(text)


@given(st.text())
def test_sentences_keep_all_letters(text):
    assert sum(map(str.isalnum, "".join(split_sentences(text)))) == sum(map(str.isalnum, text))


def test_keywords_are_found_however_their_accents_are_encoded():
    assert check("cafe\u0301", "keywords:existence", {"keywords": ["caf\u00e9"]})


@pytest.mark.parametrize(
    ("constraint_id", "kwargs", "message"),
    [
        ("keywords:existance", {}, "no constraint 'keywords:existance'. Did you mean 'keywords:existence'?"),
        ("length_constraints:number_words", {"num_words": 5}, "'length_constraints:number_words'.*relation: Field required"),
        ("length_constraints:number_words", {"num_words": None, "relation": "at least"}, "num_words: Field required"),
        ("length_constraints:number_words", less_than(num_words="five"), "num_words: Input should be a valid integer"),
        ("length_constraints:number_words", {"num_words": 5, "relation": "around"}, "relation: Input should be 'at least' or 'less than'"),
        ("punctuation:no_comma", {"num_commas": 0}, "num_commas: Extra inputs are not permitted. Expected: none"),
        ("keywords:existence", {"keywords": []}, "keywords: List should have at least 1 item"),
        ("keywords:existence", {"keywords": "word"}, "keywords: Input should be a valid list"),
        ("keywords:forbidden_words", {"forbidden_words": ["a", " "]}, "forbidden_words.1: String should match"),
        ("keywords:letter_frequency", OS | {"letter": "oo", "let_relation": "at least"}, "letter: String should have at most 1 character"),
        ("detectable_format:number_bullet_lists", {"num_bullets": 0}, "num_bullets: Input should be greater than 0"),
        ("language:response_language", {"language": "german"}, "no language with the code 'german'"),
    ],
)
def test_what_makes_no_constraint(constraint_id, kwargs, message):
    with pytest.raises(ValueError, match=message):
        check("A reply.", constraint_id, kwargs)


def test_absent_arguments_may_be_none_and_numbers_floats():
    assert parse("detectable_format:number_bullet_lists", {"num_bullets": 2.0, "relation": None, "letter": None}) == {"num_bullets": 2}


def test_only_languages_need_the_detector(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    language._identifier.cache_clear()
    assert check("No comma.", "punctuation:no_comma")
    with pytest.raises(PluginError, match=r"pip install 'drumroll\[instructions\]'"):
        check("Guten Tag.", "language:response_language", {"language": "de"})
