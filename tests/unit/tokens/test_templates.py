"""The process that renders chat templates is killed at random moments: no prompt is lost, and no process stays."""

import random

from memagent.tokens import templates
from memagent.tokens.templates import ChatTemplate
from memagent.types import Message
from tests.support.processes import kill_after
from tests.support.sizes import sized

MESSAGES: list[Message] = [{"role": "user", "content": "Who cast the bell?"}]
SLOW = "{% for a in range(400) %}{% for b in range(400) %}{% endfor %}{% endfor %}{{ messages[0].content }}"


def test_a_renderer_that_is_killed_is_replaced() -> None:
    template = ChatTemplate(SLOW, {}, name="slow")
    rng = random.Random(1)
    for _ in range(sized(2, 20)):
        assert template.render(MESSAGES) == "Who cast the bell?"
        process = templates._renderer._process
        assert process is not None
        killer = kill_after(rng.uniform(0, 0.02), lambda pid=process.pid: [pid])
        for _ in range(3):
            assert template.render(MESSAGES) == "Who cast the bell?"
        killer.join()
        process.wait(timeout=60)


def test_a_closed_renderer_leaves_no_process() -> None:
    ChatTemplate("{{ messages }}", {}, name="any").render(MESSAGES)
    process = templates._renderer._process
    assert process is not None
    templates._renderer.close()
    assert process.returncode is not None
