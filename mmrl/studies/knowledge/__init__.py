"""Knowledge as a reward: triples (head, relation, tail) are embedded, and a statement gets its triple's plausibility.

    graph        triples of a file, and which are kept back
    formulas     distances of TransE, RotatE and OTE, ranks, and the loss with self-adversarial negatives
    embeddings   the three models
    training     train one, smooth it, calibrate it; ``python -m mmrl.studies.knowledge`` is its command line
    folder       the file format of a trained embedding
    towns        a generated graph to try it on

``rewards/knowledge.py`` is the reward, docs/knowledge.md the page.
"""
