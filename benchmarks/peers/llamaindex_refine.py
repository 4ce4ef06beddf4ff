"""LlamaIndex's refine response synthesizer over an OpenAI-like model. Keeps nothing if stopped.

Its prompt helper measures every section with its tokenizer and cuts those which do not fit the
window; the window here is wide enough for all, so each section is one call.
"""

from argparse import Namespace

from harness import API_KEY, MAX_TOKENS, MODEL, NO_MEMORY, PROMPT, QUESTION, run
from llama_index.core import PromptTemplate
from llama_index.core.response_synthesizers import ResponseMode, get_response_synthesizer
from llama_index.llms.openai_like import OpenAILike

CONTEXT_WINDOW = 32_768
FIRST = PROMPT.format(question="{query_str}", memory=NO_MEMORY, section="{context_str}")
LATER = PROMPT.format(question="{query_str}", memory="{existing_answer}", section="{context_msg}")


def read(options: Namespace, sections: list[str]) -> str:
    model = OpenAILike(
        model=MODEL,
        api_base=options.base_url,
        api_key=API_KEY,
        context_window=CONTEXT_WINDOW,
        max_tokens=MAX_TOKENS,
        is_chat_model=True,
    )
    synthesizer = get_response_synthesizer(
        llm=model,
        response_mode=ResponseMode.REFINE,
        text_qa_template=PromptTemplate(FIRST),
        refine_template=PromptTemplate(LATER),
    )
    return synthesizer.get_response(QUESTION, sections)


if __name__ == "__main__":
    packages = ["llama-index-core", "llama-index-llms-openai-like", "openai"]
    run("llama-index refine", read, packages=packages)
