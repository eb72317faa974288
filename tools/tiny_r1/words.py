"""Word lists of the tiny-r1 problems. Every word is one token, so the lists are part of the
vocabulary of the shipped model."""


def _list(*lines: str) -> tuple[str, ...]:
    return tuple(word for line in lines for word in line.split())


NAMES = _list(
    "Amara Bjorn Celia Dario Edda Farid Greta Hiro Ines Jonas Kavya Lior Maren Nadia Otis Petra",
    "Quinn Rosa Stellan Tamsin Umar Vera Wendel Xenia Yusuf Zelda Aldo Brenna Cosmo Dina Emil Fenna",
)
PLACES = _list(
    "orchard museum harbor library bakery nursery depot workshop archive dairy sawmill brewery",
    "greenhouse warehouse shelter studio pantry quarry kiosk ferry",
)
ITEMS = _list(
    "pears plums lanterns ropes candles barrels crates stamps maps bricks tiles shells kites "
    "ribbons",
    "melons jars bolts lamps blankets scrolls bottles sacks acorns coins buckets flutes mugs seeds",
)
CONTAINERS = _list("boxes carts trays bags baskets pallets")
PLANTS = _list("tulips cabbages leeks roses saplings vines beets daisies")
EVENTS = _list("concert play lecture circus fair match parade")
LIQUIDS = _list("water milk oil juice cider")
