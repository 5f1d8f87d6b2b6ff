"""Passages that answer a question: found by the cosine of embeddings, then put in order by a reranker."""

from __future__ import annotations

import argparse

import numpy as np

from llmjax import LLM

PASSAGES = [
    "Johann Wolfgang von Goethe worked on his tragedy Faust for about sixty years.",
    "The Eiffel Tower was finished in 1889 and is 330 meters high.",
    "William Shakespeare wrote Hamlet around the year 1600.",
    "Bread rises because yeast makes carbon dioxide.",
    "Mount Everest is the highest mountain above sea level.",
    "Gradient descent follows the slope of a function down to a minimum.",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--embedder", default="sentence-transformers/all-MiniLM-L6-v2", help="model of embeddings")
    parser.add_argument("--reranker", default="BAAI/bge-reranker-base", help="model that judges pairs, or none")
    parser.add_argument("--query", default="Who wrote the play about Doctor Faust?", help="the question")
    parser.add_argument("--candidates", type=int, default=3, metavar="N", help="passages for the reranker (default: 3)")
    arguments = parser.parse_args()

    embedder = LLM(model=arguments.embedder)
    vectors = np.array([output.outputs.embedding for output in embedder.embed([arguments.query, *PASSAGES])])
    embedder.close()
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    cosines = vectors[1:] @ vectors[0]
    found = np.argsort(-cosines)[: arguments.candidates]
    print("By embeddings:")
    for number in found:
        print(f"  {cosines[number]:.3f}  {PASSAGES[number]}")
    if arguments.reranker == "none":
        return

    reranker = LLM(model=arguments.reranker)
    scores = [output.outputs.score for output in reranker.score(arguments.query, [PASSAGES[i] for i in found])]
    reranker.close()
    print("Put in order:")
    for score, number in sorted(zip(scores, found, strict=True), reverse=True):
        print(f"  {score:.3f}  {PASSAGES[number]}")


if __name__ == "__main__":
    main()
