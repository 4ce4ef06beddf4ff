"""langchain_refine.py with LangChain's SQLite cache of model replies.

Durable in this sense: a second run asks the cache for every step before the one it was stopped at.
"""

from argparse import Namespace

from harness import run
from langchain_community.cache import SQLiteCache
from langchain_core.globals import set_llm_cache
from langchain_refine import read as read_uncached


def read(options: Namespace, sections: list[str]) -> str:
    set_llm_cache(SQLiteCache(database_path=str(options.work_dir / "langchain.db")))
    return read_uncached(options, sections)


if __name__ == "__main__":
    run(
        "langchain refine + SQLite cache",
        read,
        packages=["langchain-core", "langchain-openai", "langchain-community", "openai"],
    )
