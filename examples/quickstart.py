"""Ask a question of a long text and watch the memory change from section to section.

    python examples/quickstart.py --engine scripted
    python examples/quickstart.py --model NAME
    python examples/quickstart.py --model NAME --file book.pdf --question "Who inherits the house?"

The endpoint is taken from the environment: URL and API_KEY, or the names that
`memagent ask --help` lists. Without --file an invented town archive is read.
"""

from __future__ import annotations

import argparse
import os
import sys
from textwrap import indent

from memagent import Document, MemagentError, Reader, Step, open_engine
from memagent.documents.sample import QUESTIONS, town_archive


def main() -> None:
    arguments = parse_arguments()
    engine = open_engine(arguments.engine or f"openai:{arguments.model}", **endpoint(arguments))
    reader = Reader(engine)
    document = (
        Document.load(arguments.file)
        if arguments.file
        else Document.from_text(town_archive(), "the town archive")
    )
    print(f"reading {document.source} with {engine.model}: {arguments.question}")
    for step in reader.iter_steps(arguments.question, document):
        show(step)


def endpoint(arguments: argparse.Namespace) -> dict[str, str]:
    """Address and key in URL and API_KEY; memagent itself does not look there."""
    if arguments.engine or not os.environ.get("URL"):
        return {}
    key = os.environ.get("API_KEY")
    return {"base_url": os.environ["URL"], **({"api_key": key} if key else {})}


def show(step: Step) -> None:
    """Print a step: the memory after a section, or the answer."""
    if step.section is None:
        print(f"\nanswer: {step.reply}")
        return
    place = ", ".join(str(place) for place in step.section.places)
    print(f"\nsection {step.index + 1}, {step.section.num_tokens} tokens, {place}")
    print(indent(step.memory, "  | "))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--model", help="model of the endpoint in the environment")
    which.add_argument("--engine", help="any engine as KIND:MODEL, such as scripted")
    parser.add_argument("--file", help="text to read: any format that memagent reads")
    parser.add_argument("--question", default=QUESTIONS[0])
    return parser.parse_args()


if __name__ == "__main__":
    try:
        main()
    except MemagentError as error:
        sys.exit(f"quickstart: {error}")
