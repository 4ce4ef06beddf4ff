"""RULER's 13 tasks: needles, variables, words and questions in texts of any length.

    ruler/niah_single_1 .. niah_single_3      one sentence to find            needles.py
    ruler/niah_multikey_1 .. niah_multikey_3  among sentences of its kind     needles.py
    ruler/niah_multivalue, niah_multiquery    four sentences to find          needles.py
    ruler/vt                                  a chain of assignments          variables.py
    ruler/cwe, ruler/fwe                      words that occur most often     words.py
    ruler/qa_1, ruler/qa_2                    questions among paragraphs      questions.py

The parameters are those of RULER (Hsieh et al. 2024, arXiv 2404.06654); the wording is ours, and the
question is separate from the text. `docs/data.md` compares them.

    task = open_task("ruler/vt", {"tokens": 8192, "seed": 7, "tokenizer": "smollm2-135m"})
    task.example(0).question
"""
