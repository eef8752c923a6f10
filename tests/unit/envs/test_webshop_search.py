"""The shop's BM25."""

from hypothesis import given
from hypothesis import strategies as st

from drumroll.envs.webshop.search import Index

WORD = st.sampled_from(["red", "mug", "7", "xl", "a"])
TEXTS = st.lists(st.lists(WORD, min_size=1, max_size=6).map(" ".join), min_size=1, max_size=12)


def test_short_words_and_numbers_are_found():
    index = Index(["shoe size 7", "shoe size 8", "shirt size S", "shirt size XL", "lamp 5W"])
    assert index.search("7", 5) == [0]
    assert index.search("s", 5) == [2]
    assert index.search("shirt, xl", 5)[0] == 3
    assert index.search("5w", 5) == [4]


def test_rare_words_weigh_more_than_common_ones():
    assert Index(["red mug", "red bag", "red pan", "blue bag"]).search("red mug", 9)[0] == 0


def test_equal_texts_stand_in_their_own_order():
    assert Index(["mug", "bag", "mug", "mug"]).search("mug", 9) == [0, 2, 3]
    assert Index(["mug", "bag", "mug", "mug"]).search("mug", 2) == [0, 2]


def test_nothing_is_found_by_unknown_words_or_none():
    index = Index(["mug"])
    assert index.search("bag", 5) == index.search("", 5) == index.search("?!", 5) == []


@given(TEXTS, st.lists(WORD, min_size=1, max_size=4).map(" ".join), st.integers(1, 12))
def test_fewer_results_are_the_best_of_all(texts, query, most):
    everything = Index(texts).search(query, len(texts))
    assert Index(texts).search(query, most) == everything[:most]
    sharing = {n for n, text in enumerate(texts) if set(text.split()) & set(query.split())}
    assert set(everything) == sharing
