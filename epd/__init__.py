"""epd: the embedding transfer layer for disaggregated multimodal LLM serving."""
