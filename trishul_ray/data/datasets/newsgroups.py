"""20 Newsgroups, split by date: posts of 20 groups, 11,314 train and 7,532 test.

Headers, signatures and quotes are stripped, as in scikit-learn. Posts that are empty afterwards are
kept.

Source: K. Lang, collected by J. Rennie, http://qwone.com/~jason/20Newsgroups/.
"""

from trishul_ray.data.hub import HubRepo
from trishul_ray.data.public import PublicDataset, TextRows, register_dataset

#: Class names: the newsgroups, in the order of their labels.
GROUPS = (
    "alt.atheism",
    "comp.graphics",
    "comp.os.ms-windows.misc",
    "comp.sys.ibm.pc.hardware",
    "comp.sys.mac.hardware",
    "comp.windows.x",
    "misc.forsale",
    "rec.autos",
    "rec.motorcycles",
    "rec.sport.baseball",
    "rec.sport.hockey",
    "sci.crypt",
    "sci.electronics",
    "sci.med",
    "sci.space",
    "soc.religion.christian",
    "talk.politics.guns",
    "talk.politics.mideast",
    "talk.politics.misc",
    "talk.religion.misc",
)

NEWSGROUPS = register_dataset(
    PublicDataset(
        name="20newsgroups",
        description="newsgroup posts, stripped, 20 classes, 11,314 / 7,532",
        repo=HubRepo(
            "SetFit/20_newsgroups",
            revision="f1b91292074e7cfb69be58b642d583ec262f30ed",
            file_patterns=("data/{split}-*.parquet", "{split}.jsonl"),
        ),
        rows=TextRows(fields=("text",), classes=GROUPS),
        sizes={"train": 11_314, "test": 7_532},
    )
)
