"""How the shipped readers were made: scripts that write training data, and the configs' order (configs/train).

    python -m recipes.prepare_1_5b       data of reader_1.5b/warm_start, rl and items
    python -m recipes.prepare_answers    data of reader_1.5b/answers
    python -m recipes.collect_memories   data of reader_1.5b/facts: memories that a trained reader leaves
    recipes/train_1_5b.sh                warm start, validation, reinforcement learning, validation
    python -m recipes.prepare_135m       data of reader_135m/warm_start and rl

They run from a clone and are in no wheel. `questions.py` reads questions and writes texts around them, `memories.py`
composes memories; `squad.py` and `written.py` are further questions of the 135M reader.
"""
