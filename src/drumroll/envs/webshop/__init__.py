"""WebShop (Yao et al. 2022, arXiv 2207.01206): a shop as text, where the model searches, compares, chooses options and buys.

catalogue   what a product and a goal are              synthetic   a catalogue and goals that are made from a seed
search      BM25 over the products                     files       products and goals from WebShop's own files
reward      how well a purchase fits a goal            shop        products, index and goals, built once a process
site        pages, and where a click leads             pages       the pages in words, in full or compact
visit       one episode, without waiting               env         the environment
expert      demonstrations
"""

from drumroll.envs.webshop.env import WebShop
from drumroll.envs.webshop.expert import expert_episode

__all__ = ["WebShop", "expert_episode"]
