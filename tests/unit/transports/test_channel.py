"""Messages over a connection: how long one may be."""

from concurrent.futures import ThreadPoolExecutor

from distmagic.transports.channel import LONGEST
from tests.builders.dialling import channels
from tests.lab.waiting import HANG_S

AROUND_BYTES = len('{"text": ""}')


def test_a_message_that_is_too_long_is_not_sent_and_the_next_one_is(golden):
    with channels() as (one, other):
        with golden.raises(ValueError):
            one.tell(text="x" * (LONGEST - AROUND_BYTES + 1))
        one.tell(text="short")
        assert other.hear(HANG_S) == {"text": "short"}


def test_the_longest_message_arrives():
    longest = "x" * (LONGEST - AROUND_BYTES)
    with channels() as (one, other):
        with ThreadPoolExecutor(1) as thread:
            heard = thread.submit(other.hear, HANG_S)
            one.tell(text=longest)
        assert heard.result() == {"text": longest}
