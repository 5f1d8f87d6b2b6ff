"""Output text → reasoning, content and tool calls, as it is streamed.

A family of models is a ``Grammar``: states, what the text in each of them means, and the markers that lead from one to
the next (``families``, ``reasoning``). One automaton, ``OutputParser``, runs them all.
"""
