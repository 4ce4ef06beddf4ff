"""The lessons of the 135M reader: questions written by rule, and the texts around them."""

import json
import random
from pathlib import Path

from memagent.data.example import Evidence, Example, Passage
from recipes import prepare_135m, questions, squad, written


def test_an_answer_about_a_chronicle_stands_in_its_evidence() -> None:
    for seed in range(300):
        question = written.Chronicle(random.Random(seed)).question(2)
        [gold] = question.gold
        evidence = " ".join(gold.sentences[number] for number in gold.support)
        assert all(part in evidence.lower() for part in question.answers[0].lower().split(", "))
        others = [sentence for one in question.hard for sentence in one.sentences]
        assert evidence not in others


def test_what_a_paragraph_says_about_its_title_is_asked() -> None:
    paragraph = questions.Paragraph(
        title="The Glass Pier (film)",
        sentences=(
            "The Glass Pier is a 1961 film directed by Ada Holm, her first.",
            "It was released on 4 March 1961.",
            "Many liked it.",
        ),
    )
    found = {
        (question.text, question.answers[0], question.gold[0].support)
        for question in written.relation_questions(paragraph)
    }
    assert {(answer, support) for _, answer, support in found} == {
        ("Ada Holm", (0,)),
        ("4 March 1961", (1,)),
    }
    assert all("The Glass Pier" in text and "(film)" not in text for text, _, _ in found)


def test_two_things_about_a_title_are_asked_at_once() -> None:
    paragraph = questions.Paragraph(
        title="The Glass Pier (film)",
        sentences=(
            "The Glass Pier is a film directed by Ada Holm, her first.",
            "It was released on 4 March 1961.",
        ),
    )
    [question] = written.two_part_questions(paragraph)
    assert question.answers == ("Ada Holm, 4 March 1961",)
    assert question.gold[0].support == (0, 1)
    assert " and " in question.text
    assert question.text.count("?") == 1


def test_squad_questions_have_the_sentence_of_their_answer(tmp_path: Path) -> None:
    context = "The weir is old. It was built in 1702 by monks. Nobody knows why."
    answers = [{"text": "1702", "answer_start": context.index("1702")}]
    asked = [
        {"id": "a", "question": "When was the weir built? ", "answers": answers},
        {"id": "b", "question": "Why?", "answers": [], "is_impossible": True},
    ]
    paragraphs = [{"context": context, "qas": asked}, {"context": "The mill burnt.", "qas": []}]
    path = tmp_path / "train.json"
    path.write_text(json.dumps({"data": [{"title": "Weir", "paragraphs": paragraphs}]}))
    [question] = squad.squad_questions(path)
    assert (question.text, question.answers) == ("When was the weir built?", ("1702",))
    assert (
        question.gold[0].sentences[question.gold[0].support[0]] == "It was built in 1702 by monks."
    )
    assert [one.sentences for one in question.hard] == [("The mill burnt.",)]
    assert len(squad.squad_paragraphs(path)) == 2


def test_paired_questions_are_written_as_text_is(tmp_path: Path) -> None:
    sources, asked = tmp_path / "src-test.txt", tmp_path / "tgt-test.txt"
    sources.write_text("the weir -lrb- in farnley -rrb- is old .\nmonks built it , they say .\n")
    asked.write_text("where is the weir ?\nwho built farnley 's weir ?\n")
    casing = squad.Casing(["Old Farnley is a town.", "They saw Farnley."])
    found = list(squad.paired_questions(sources, asked, casing, known={"whereistheweir"}))
    [question] = found
    assert question.text == "Who built Farnley's weir?"
    assert question.gold[0].sentences == (
        "The weir (in Farnley) is old.",
        "Monks built it, they say.",
    )
    assert (question.gold[0].support, question.answers) == ((1,), ("",))


def test_lessons_without_a_known_answer_end_with_the_memory() -> None:
    lines = [json.dumps({"content": said}) for said in ("It rained.", "\\boxed{}", "\\boxed{3}")]
    assert list(prepare_135m.with_answers(lines)) == [lines[0], lines[2]]


def test_a_sentence_with_a_gap_is_a_question() -> None:
    sentences = ("The mill at the weir was bought by Ada Karin Holm from the parish council.",)
    paragraph = questions.Paragraph(title="Weir Mill", sentences=sentences)
    for seed in range(20):
        [question] = written.place_questions(paragraph, random.Random(seed))
        assert question.answers == ("Ada Karin Holm",)
        assert "Holm" not in question.text
        assert question.text.endswith("?")


def test_documents_as_prose_keep_their_evidence() -> None:
    example = Example(
        id="one",
        task="questions",
        question="Where?",
        answers=("Farnley",),
        documents=(Passage(title="A", text="First."), Passage(title="B", text="It is in Farnley.")),
        evidence=(Evidence(document=1, start=0, end=17, text="It is in Farnley."),),
        metadata={"candidates": [(len("Document 1:\nA\nFirst."), "First.", 0.5)]},
    )
    prose = prepare_135m.as_prose(example, "Heading")
    [(start, end)] = prose.evidence_offsets()
    assert prose.text() == "Heading\n\nA\nFirst.\n\nB\nIt is in Farnley."
    assert prose.text()[start:end] == "It is in Farnley."
    assert prose.evidence[0].note == "B: It is in Farnley."
    [(place, _, _)] = prose.metadata["candidates"]
    assert prose.text()[:place].endswith("First.")
    without = prepare_135m.unanswered(example)
    assert (without.evidence, without.text()) == ((), "Document 1:\nA\nFirst.")
    assert without.answers[0] == "The text does not tell."


def test_the_questions_of_the_demo_are_only_for_validation() -> None:
    examples = list(prepare_135m.demo_examples())
    assert len(examples) == 12
    for example in examples:
        [(start, end)] = example.evidence_offsets()
        assert example.answers[0] in example.text()[start:end]
    forbidden = written.FORBIDDEN
    for example in examples:
        said = f"{example.question} {example.evidence[0].text}".lower()
        assert any(word in said for word in forbidden) or "doctor" in said
