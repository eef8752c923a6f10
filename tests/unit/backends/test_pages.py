"""The books of pages: every page is held, at rest or free, and what is found under a key is what was sealed there."""

from hypothesis import given, settings
from hypothesis import strategies as st

from drumroll.backends.infer.native.pages import PageBook

SIZE = 4
TOKENS = st.lists(st.integers(0, 1), min_size=0, max_size=14)


def begin(book: PageBook, tokens: list[int]) -> tuple[list[int], int] | None:
    """Take a request's pages, sharing what is there; the pages, and how many of them were."""
    pages: list[int] = []
    keys = list(book.keys(tokens))
    for key in keys[: len(tokens) // SIZE]:
        page = book.find(key)
        if page is None:
            break
        book.hold(page)
        pages.append(page)
    num_shared = len(pages)
    while len(pages) < len(keys):
        page = book.take()
        if page is None:
            book.release(pages)
            return None
        pages.append(page)
    for page, key in zip(pages, keys, strict=True):
        book.seal(page, key)
    return pages, num_shared


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(TOKENS, st.booleans()), max_size=30), st.integers(4, 12))
def test_pages_are_neither_lost_nor_given_away_twice(requests: list[tuple[list[int], bool]], num_pages: int) -> None:
    book = PageBook(num_pages, SIZE)
    open_: list[tuple[list[int], list[int], int]] = []
    contents: dict[int, list[int]] = {}
    for tokens, ends in requests:
        begun = begin(book, tokens)
        if begun is not None:
            pages, num_shared = begun
            for number, page in enumerate(pages):
                if number < num_shared:
                    assert contents[page] == tokens[: (number + 1) * SIZE], "a page is found by all tokens up to its end"
                else:
                    contents[page] = tokens[: (number + 1) * SIZE]
            open_.append((tokens, pages, num_shared))
        if ends and open_:
            book.release(open_.pop(0)[1])
        held = {page for _, pages, _ in open_ for page in pages}
        own = [page for _, pages, num_shared in open_ for page in pages[num_shared:]]
        assert len(own) == len(set(own)), "two requests write into one page"
        assert book.num_available == num_pages - len(held)
    for _, pages, _ in open_:
        book.release(pages)
    assert book.num_available == num_pages


def test_equal_beginnings_have_equal_keys_and_rests_have_keys_of_their_own() -> None:
    book = PageBook(4, SIZE)
    one, two = list(book.keys([1, 2, 3, 4, 5, 6])), list(book.keys([1, 2, 3, 4, 5]))
    assert len(one) == len(two) == 2
    assert one[0] == two[0]
    assert one[1] != two[1]
    assert list(book.keys([9, 2, 3, 4, 5, 6]))[1] != one[1], "a page counts with all that stands before it"


def test_nothing_is_found_after_new_weights() -> None:
    book = PageBook(2, SIZE)
    pages, _ = begin(book, [1, 2, 3, 4]) or ([], 0)
    (key,) = book.keys([1, 2, 3, 4])
    assert book.find(key) == pages[0]
    book.forget()
    assert book.find(key) is None
    book.release(pages)
    assert book.num_available == 2


def test_the_page_that_has_been_at_rest_for_longest_is_given_up_first() -> None:
    book = PageBook(2, SIZE)
    for tokens in ([1] * SIZE, [2] * SIZE):
        pages, _ = begin(book, tokens) or ([], 0)
        book.release(pages)
    book.take()
    assert book.find(next(book.keys([1] * SIZE))) is None
    assert book.find(next(book.keys([2] * SIZE))) is not None
