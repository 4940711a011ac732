"""The papers behind a drafter, as BibTeX. Knows no model."""

from __future__ import annotations


def _entry(key: str, title: str, authors: str, arxiv: str, year: int) -> str:
    names = authors.replace(", ", " and ")
    fields = {"title": title, "author": names, "journal": f"arXiv preprint arXiv:{arxiv}", "year": year}
    lines = ",\n".join(f"  {name}={{{value}}}" for name, value in fields.items())
    return f"@article{{{key},\n{lines}\n}}"


PAPERS = {
    "mtpc": _entry(
        "grivas2025mtpc",
        "Fast and Expressive Multi-Token Prediction with Probabilistic Circuits",
        "Andreas Grivas, Lorenzo Loconte, Emile van Krieken, Piotr Nawrot, Yu Zhao, Euan Wielewski, "
        "Pasquale Minervini, Edoardo Ponti, Antonio Vergari",
        "2511.11346",
        2025,
    ),
    "gloeckle": _entry(
        "gloeckle2024better",
        "Better \\& Faster Large Language Models via Multi-token Prediction",
        "Fabian Gloeckle, Badr Youbi Idrissi, Baptiste Rozi{\\`e}re, David Lopez-Paz, Gabriel Synnaeve",
        "2404.19737",
        2024,
    ),
    "medusa": _entry(
        "cai2024medusa",
        "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads",
        "Tianle Cai, Yuhong Li, Zhengyang Geng, Hongwu Peng, Jason D. Lee, Deming Chen, Tri Dao",
        "2401.10774",
        2024,
    ),
    "hydra": _entry(
        "ankner2024hydra",
        "Hydra: Sequentially-Dependent Draft Heads for Medusa Decoding",
        "Zachary Ankner, Rishab Parthasarathy, Aniruddha Nrusimha, Christopher Rinard, Jonathan Ragan-Kelley, "
        "William Brandon",
        "2402.05109",
        2024,
    ),
    "modules": _entry("deepseekai2024v3", "DeepSeek-V3 Technical Report", "DeepSeek-AI", "2412.19437", 2024),
    "eagle1": _entry(
        "li2024eagle",
        "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty",
        "Yuhui Li, Fangyun Wei, Chao Zhang, Hongyang Zhang",
        "2401.15077",
        2024,
    ),
    "eagle3": _entry(
        "li2025eagle3",
        "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test",
        "Yuhui Li, Fangyun Wei, Chao Zhang, Hongyang Zhang",
        "2503.01840",
        2025,
    ),
    "uniforms": _entry(
        "draxler2025ptp",
        "Parallel Token Prediction for Language Models",
        "Felix Draxler, Justus Will, Farrin Marouf Sofian, Theofanis Karaletsos, Sameer Singh, Stephan Mandt",
        "2512.21323",
        2025,
    ),
    "mask": _entry(
        "samragh2025future",
        "Your LLM Knows the Future: Uncovering Its Multi-Token Prediction Potential",
        "Mohammad Samragh, Arnav Kundu, David Harrison, Kumari Nishu, Devang Naik, Minsik Cho, Mehrdad Farajtabar",
        "2507.11851",
        2025,
    ),
}
"""BibTeX entries by what a drafter is."""
