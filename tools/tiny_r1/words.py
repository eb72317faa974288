"""Word lists of the tiny-r1 problems. Every word is one token, so each list is part of the vocabulary of the shipped model."""

NAMES = (
    "Amara Bjorn Celia Dario Edda Farid Greta Hiro Ines Jonas Kavya Lior Maren Nadia Otis Petra "
    "Quinn Rosa Stellan Tamsin Umar Vera Wendel Xenia Yusuf Zelda Aldo Brenna Cosmo Dina Emil Fenna"
).split()

PLACES = (
    "orchard museum harbor library bakery nursery depot workshop archive dairy sawmill brewery "
    "greenhouse warehouse shelter studio pantry quarry kiosk ferry"
).split()

ITEMS = (
    "pears plums lanterns ropes candles barrels crates stamps maps bricks tiles shells kites ribbons "
    "melons jars bolts lamps blankets scrolls bottles sacks acorns coins buckets flutes mugs seeds"
).split()

CONTAINERS = "boxes carts trays bags baskets pallets".split()

PLANTS = "tulips cabbages leeks roses saplings vines beets daisies".split()

EVENTS = "concert play lecture circus fair match parade".split()

LIQUIDS = "water milk oil juice cider".split()
