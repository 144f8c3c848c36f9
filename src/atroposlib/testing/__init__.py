"""Parts for testing environments and servers without a network: real servers on loopback, tiny tokenizers, an environment checker."""
