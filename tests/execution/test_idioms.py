"""User code trains the same with `execution="auto"` as with "eager", or runs eagerly with a message."""

import pytest
from idioms import FILE, IDIOMS, assert_same, check_messages

PPO_FUNCTIONS, REPLAY_FUNCTIONS = {"act", "process", "learn"}, {"explore", "insert", "learn"}


@pytest.mark.parametrize("idiom", IDIOMS, ids=lambda idiom: idiom.name)
def test_user_code_trains_as_it_does_eagerly(idiom):
    auto = idiom.run("auto")
    assert_same(auto, idiom.run("eager"))
    executor = auto.executor
    check_messages(auto.messages, executor.eager_only, FILE, range(idiom.first_line, idiom.last_line + 1))
    recorded = {signature[0] for signature in executor.graphs}
    if idiom.expected == "recorded":
        wanted = REPLAY_FUNCTIONS if auto.runner.alg.learns_from_replay else PPO_FUNCTIONS
        assert not executor.eager_only, auto.messages
        assert wanted <= recorded
    if idiom.expected == "eager":
        assert executor.eager_only, f"recorded: {recorded}"
