"""llama-index: embeddings of texts and queries, in batches, also asynchronously; prints those of the texts.

python llama_index_client.py URL TEXT...
"""

import asyncio
import json
import sys

from llama_index.embeddings.openai_like import OpenAILikeEmbedding


def main(url: str, texts: list[str]) -> None:
    model = OpenAILikeEmbedding(model_name="embedder", api_base=url, api_key="none", embed_batch_size=2, max_retries=0)
    found = model.get_text_embedding_batch(texts)
    again = asyncio.run(model.aget_text_embedding_batch(texts))
    query = model.get_query_embedding(texts[0])
    assert len(query) == len(found[0]) and len(again) == len(texts)
    assert model.similarity(again[0], found[0]) > 0.999
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
