"""LangChain's RefineDocumentsChain, deprecated, from langchain-classic. Keeps nothing if stopped."""

import warnings
from argparse import Namespace

from harness import API_KEY, MAX_TOKENS, MODEL, NO_MEMORY, PROMPT, QUESTION, run
from langchain_classic.chains import LLMChain, RefineDocumentsChain
from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from langchain_openai import ChatOpenAI


def refine_chain(base_url: str) -> RefineDocumentsChain:
    model = ChatOpenAI(model=MODEL, base_url=base_url, api_key=API_KEY, max_tokens=MAX_TOKENS)
    first = ChatPromptTemplate([("human", PROMPT.replace("{memory}", NO_MEMORY))])
    later = ChatPromptTemplate([("human", PROMPT)])
    return RefineDocumentsChain(
        initial_llm_chain=LLMChain(llm=model, prompt=first),
        refine_llm_chain=LLMChain(llm=model, prompt=later),
        document_prompt=PromptTemplate.from_template("{page_content}"),
        document_variable_name="section",
        initial_response_name="memory",
    )


def read(options: Namespace, sections: list[str]) -> str:
    warnings.simplefilter("ignore")  # LangChain turns its own on, whatever PYTHONWARNINGS says
    documents = [Document(page_content=section) for section in sections]
    chain = refine_chain(options.base_url)
    return chain.invoke({"input_documents": documents, "question": QUESTION})["output_text"]


if __name__ == "__main__":
    run(
        "langchain-classic RefineDocumentsChain",
        read,
        packages=["langchain-classic", "langchain-core", "langchain-openai", "openai"],
    )
