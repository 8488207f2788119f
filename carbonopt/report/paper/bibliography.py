"""The references that a study's text cites."""

from pathlib import Path

from carbonopt import __version__
from carbonopt.core.config import Dataset, StudyConfig

_ENTRIES = {
    "carbonopt": r"""@misc{carbonopt,
  author = {{The carbonopt authors}},
  title = {carbonopt: the fine-tuning configuration with the lowest emissions that still reaches a target quality},
  note = {Software, version VERSION},
}""",
    "akiba2019optuna": r"""@inproceedings{akiba2019optuna,
  author = {Akiba, Takuya and Sano, Shotaro and Yanase, Toshihiko and Ohta, Takeru and Koyama, Masanori},
  title = {Optuna: A Next-generation Hyperparameter Optimization Framework},
  booktitle = {Proceedings of the 25th ACM SIGKDD International Conference on Knowledge Discovery and Data Mining},
  pages = {2623--2631},
  year = {2019},
  doi = {10.1145/3292500.3330701},
}""",
    "rasley2020deepspeed": r"""@inproceedings{rasley2020deepspeed,
  author = {Rasley, Jeff and Rajbhandari, Samyam and Ruwase, Olatunji and He, Yuxiong},
  title = {{DeepSpeed}: System Optimizations Enable Training Deep Learning Models with Over 100 Billion Parameters},
  booktitle = {Proceedings of the 26th ACM SIGKDD International Conference on Knowledge Discovery and Data Mining},
  pages = {3505--3506},
  year = {2020},
  doi = {10.1145/3394486.3406703},
}""",
    "rajbhandari2020zero": r"""@inproceedings{rajbhandari2020zero,
  author = {Rajbhandari, Samyam and Rasley, Jeff and Ruwase, Olatunji and He, Yuxiong},
  title = {{ZeRO}: Memory Optimizations Toward Training Trillion Parameter Models},
  booktitle = {SC20: International Conference for High Performance Computing, Networking, Storage and Analysis},
  pages = {1--16},
  year = {2020},
  doi = {10.1109/SC41405.2020.00024},
}""",
    "courty2024codecarbon": r"""@misc{courty2024codecarbon,
  author = {Courty, Benoit and Schmidt, Victor and Luccioni, Sasha and others},
  title = {mlco2/codecarbon: v2.4.1},
  howpublished = {Zenodo},
  year = {2024},
  doi = {10.5281/zenodo.11171501},
  note = {\url{https://doi.org/10.5281/zenodo.11171501}},
}""",
    "wolf2020transformers": r"""@inproceedings{wolf2020transformers,
  author = {Wolf, Thomas and Debut, Lysandre and Sanh, Victor and Chaumond, Julien and Delangue, Clement
    and Moi, Anthony and Cistac, Pierric and Rault, Tim and Louf, R{\'e}mi and Funtowicz, Morgan and others},
  title = {Transformers: State-of-the-Art Natural Language Processing},
  booktitle = {Proceedings of the 2020 Conference on Empirical Methods in Natural Language Processing:
    System Demonstrations},
  pages = {38--45},
  year = {2020},
  doi = {10.18653/v1/2020.emnlp-demos.6},
}""",
    "deb2002nsga2": r"""@article{deb2002nsga2,
  author = {Deb, Kalyanmoy and Pratap, Amrit and Agarwal, Sameer and Meyarivan, T.},
  title = {A Fast and Elitist Multiobjective Genetic Algorithm: {NSGA-II}},
  journal = {IEEE Transactions on Evolutionary Computation},
  volume = {6},
  number = {2},
  pages = {182--197},
  year = {2002},
  doi = {10.1109/4235.996017},
}""",
    "bergstra2011tpe": r"""@inproceedings{bergstra2011tpe,
  author = {Bergstra, James and Bardenet, R{\'e}mi and Bengio, Yoshua and K{\'e}gl, Bal{\'a}zs},
  title = {Algorithms for Hyper-Parameter Optimization},
  booktitle = {Advances in Neural Information Processing Systems 24},
  year = {2011},
}""",
    "bergstra2012random": r"""@article{bergstra2012random,
  author = {Bergstra, James and Bengio, Yoshua},
  title = {Random Search for Hyper-Parameter Optimization},
  journal = {Journal of Machine Learning Research},
  volume = {13},
  pages = {281--305},
  year = {2012},
}""",
    "pedregosa2011scikit": r"""@article{pedregosa2011scikit,
  author = {Pedregosa, Fabian and Varoquaux, Ga{\"e}l and Gramfort, Alexandre and Michel, Vincent and Thirion, Bertrand
    and Grisel, Olivier and others},
  title = {Scikit-learn: Machine Learning in {Python}},
  journal = {Journal of Machine Learning Research},
  volume = {12},
  pages = {2825--2830},
  year = {2011},
}""",
    "merity2017wikitext": r"""@inproceedings{merity2017wikitext,
  author = {Merity, Stephen and Xiong, Caiming and Bradbury, James and Socher, Richard},
  title = {Pointer Sentinel Mixture Models},
  booktitle = {International Conference on Learning Representations},
  year = {2017},
}""",
    "karpathy2015unreasonable": r"""@misc{karpathy2015unreasonable,
  author = {Karpathy, Andrej},
  title = {The Unreasonable Effectiveness of Recurrent Neural Networks},
  year = {2015},
  note = {\url{https://karpathy.github.io/2015/05/21/rnn-effectiveness/}},
}""",
    "python-docs": r"""@misc{python-docs,
  author = {{Python Software Foundation}},
  title = {Python Documentation},
  note = {\url{https://docs.python.org/3/}},
}""",
}

_OF_SAMPLER = {  # Optuna's Gaussian process and grid have no paper but Optuna's
    "carbon": "carbonopt",
    "tpe": "bergstra2011tpe",
    "nsga2": "deb2002nsga2",
    "random": "bergstra2012random",
}
_OF_TRAINING = ("wolf2020transformers", "rasley2020deepspeed", "rajbhandari2020zero")
_OF_DATA = {"wikitext": "merity2017wikitext", "shakespeare": "karpathy2015unreasonable"}  # by what its name holds


def sampler_key(config: StudyConfig) -> str:
    return _OF_SAMPLER.get(config.search.sampler, "akiba2019optuna")


def dataset_key(dataset: Dataset) -> str | None:
    """Of a data set that is known by its name; None: it is not."""
    if dataset.builtin is not None:
        return dataset.builtin
    names = [dataset.name_or_path or "", *(Path(file).name for file in dataset.train_files or ())]
    found = (key for part, key in _OF_DATA.items() if any(part in name.lower() for name in names))
    return next(found, None)


def keys(config: StudyConfig, *, learned: bool) -> tuple[str, ...]:
    """What the text cites, in the order of the bibliography; a replay, which trains nothing, no tools of training."""
    wanted: set[str | None] = {"carbonopt", "akiba2019optuna", "courty2024codecarbon", sampler_key(config)}
    if config.workload is not None:
        wanted |= {*_OF_TRAINING, dataset_key(config.workload.dataset)}
    if learned:
        wanted.add("pedregosa2011scikit")
    return tuple(key for key in _ENTRIES if key in wanted)


def bibliography(config: StudyConfig, *, learned: bool) -> str:
    """The BibTeX file. `learned`: what each parameter does is known."""
    entries = "\n\n".join(_ENTRIES[key] for key in keys(config, learned=learned))
    return entries.replace("VERSION", __version__) + "\n"
