"""What the model of these tests answers: to a message that ends in ``[[name]]``, or in a known question, a text."""

from __future__ import annotations

import json

LINES = 1000

DESCENT = "How does gradient descent work? Show me the formula and some code."
SUM = "What is seven plus five?"
WEATHER = "What is the weather in Paris?"

WELCOME = r"""Gradient descent walks **downhill** on the loss, one small step at a time:

$$\theta_{t+1} = \theta_t - \eta \, \nabla_\theta L(\theta_t), \qquad \eta > 0$$

The learning rate $\eta$ decides how far each step goes. In Python:

```python
import numpy as np

def descend(gradient, start, rate=0.1, steps=100):
    # Follows the gradient down from a point.
    x = np.asarray(start, dtype=float)
    for _ in range(steps):
        x = x - rate * gradient(x)
    return x

print(descend(lambda x: 2 * (x - 3), [10.0]))  # close to 3
```

| rate | what happens |
|---|---|
| too small | slow, but it gets there |
| about right | fast |
| too large | it jumps over the valley |

1. Begin with a small rate.
2. Watch the loss, and `halve` the rate when it rises.
"""

HOSTILE = """Look <script>window.hacked = 1</script> and <img src=x onerror="window.hacked = 2">
<svg onload="window.hacked = 3"></svg><iframe srcdoc="<script>parent.hacked = 4</script>"></iframe>

[first link](javascript:window.hacked=5) and [second one](data:text/html,<script>opener.hacked=6</script>) \
and [a third](https://evil.example/path "x\\" onmouseover=\\"window.hacked=7")

![picture](https://evil.example/pixel.png) and <a href="vbscript:hacked">fourth</a> <style>*{display:none}</style>

$\\href{javascript:window.hacked=8}{formula}$ and $\\includegraphics{https://evil.example/y.png}$

<form action="https://evil.example"><button>go</button></form><base href="https://evil.example/">

```html
<script>window.hacked = 9</script>
```

Done with all of it."""


def called(name: str, **arguments: object) -> str:
    """A call as the model writes it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


SCRIPTS = {
    DESCENT: WELCOME,
    "hello": "Hello, dear reader! How may I help you on this fine day?",
    "other": "Another answer of quite another kind, as you have wished.",
    SUM: "<think>\nThe sum of seven and five must be twelve.\n</think>\n\nIt comes to twelve, without any doubt.",
    WEATHER: 'Let me see.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>',
    "sunny": "Paris has sunshine today, so leave your umbrella at home.",
    "lookup": "I look it up. " + called("local__recalls", topic="sunny"),
    "patience": called("local__waits", seconds=3600),
    "hostile": HOSTILE,
    "code": "Here it comes:\n\n```python\n"
    + "".join(f"value_{i:04} = compute({i:04}, seed={7 * i + 13})\n" for i in range(LINES))
    + "```\n\nThat was the whole of it.",
}
SPECIAL = ["<think>", "</think>", DESCENT, SUM, WEATHER]
# The signs of tool calls and reasoning stand in a comment; the prompt is the last message alone.
TEMPLATE = (
    "{# <tool_call> <think></think> #}{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
    "{% set m = messages[-1] %}{{ m.role }}|{{ m.tool_call_id or '' }}|{{ m.tool_calls or '' }}|{{ m.content }}"
)
CONTEXT = 4096
