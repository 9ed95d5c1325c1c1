"""Nouns of photo captions, grouped so that one can stand in for another and mean something else.

Things of a category replace each other, except those that one picture may show as the same thing.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

# Things are parted by ;, the names of one thing follow each other as singular/plural, the usual
# name first. What cannot be counted has no plural.
_NOUNS = {
    "person": (
        "man/men guy/guys gentleman/gentlemen; woman/women lady/ladies; boy/boys; girl/girls; "
        "child/children kid/kids; baby/babies infant/infants; toddler/toddlers"
    ),
    "role": (
        "chef/chefs; soldier/soldiers; firefighter/firefighters fireman/firemen; "
        "policeman/policemen; waiter/waiters; farmer/farmers; fisherman/fishermen; "
        "musician/musicians; guitarist/guitarists; drummer/drummers; clown/clowns; "
        "surfer/surfers; skier/skiers; snowboarder/snowboarders; skateboarder/skateboarders; "
        "cyclist/cyclists biker/bikers; swimmer/swimmers; dancer/dancers; cowboy/cowboys; "
        "bride/brides; pitcher/pitchers; goalie/goalies goalkeeper/goalkeepers"
    ),
    "animal": (
        "dog/dogs puppy/puppies; cat/cats kitten/kittens; horse/horses pony/ponies; cow/cows; "
        "sheep/sheep lamb/lambs; goat/goats; pig/pigs; rabbit/rabbits bunny/bunnies; bird/birds; "
        "duck/ducks; chicken/chickens; elephant/elephants; giraffe/giraffes; zebra/zebras; "
        "bear/bears; lion/lions; tiger/tigers; monkey/monkeys; deer/deer; camel/camels; "
        "fish/fish; butterfly/butterflies"
    ),
    "vehicle": (
        "car/cars; bus/buses; truck/trucks; van/vans; taxi/taxis cab/cabs; motorcycle/motorcycles "
        "motorbike/motorbikes; bicycle/bicycles bike/bikes; scooter/scooters; tricycle/tricycles; "
        "train/trains; tractor/tractors; boat/boats sailboat/sailboats; canoe/canoes; "
        "kayak/kayaks; ship/ships; plane/planes airplane/airplanes; helicopter/helicopters; "
        "skateboard/skateboards; surfboard/surfboards; sled/sleds; wagon/wagons"
    ),
    "building": (
        "house/houses; tower/towers; tent/tents; church/churches; barn/barns; castle/castles; "
        "hut/huts; bridge/bridges; fountain/fountains; lighthouse/lighthouses"
    ),
    "plant": (
        "tree/trees; bush/bushes shrub/shrubs; flower/flowers; cactus/cacti; mushroom/mushrooms"
    ),
    "place": (
        "beach/beaches; street/streets; park/parks; field/fields; meadow/meadows; forest/forests; "
        "kitchen/kitchens; bathroom/bathrooms; bedroom/bedrooms; office/offices; "
        "restaurant/restaurants; store/stores shop/shops; market/markets; stadium/stadiums; "
        "playground/playgrounds; desert/deserts; airport/airports; museum/museums; "
        "library/libraries; garage/garages; room/rooms; city/cities"
    ),
    "ground": "grass; snow; sand; mud; ice",
    "water": (
        "pool/pools; lake/lakes; river/rivers; ocean/oceans sea/seas; puddle/puddles; "
        "waterfall/waterfalls"
    ),
    "clothing": (
        "shirt/shirts; dress/dresses; jacket/jackets coat/coats; sweater/sweaters; skirt/skirts; "
        "suit/suits; apron/aprons; swimsuit/swimsuits bikini/bikinis; costume/costumes; "
        "vest/vests; robe/robes"
    ),
    "headwear": (
        "hat/hats; helmet/helmets; scarf/scarves; crown/crowns; wig/wigs; bandanna/bandannas "
        "bandana/bandanas"
    ),
    "furniture": (
        "table/tables; chair/chairs; bench/benches; couch/couches sofa/sofas; bed/beds; "
        "desk/desks; stool/stools; lamp/lamps; shelf/shelves; mirror/mirrors; "
        "refrigerator/refrigerators fridge/fridges; oven/ovens; toilet/toilets; sink/sinks; "
        "bathtub/bathtubs"
    ),
    "toy": (
        "ball/balls; kite/kites; balloon/balloons; frisbee/frisbees; doll/dolls; "
        "trampoline/trampolines"
    ),
    "object": (
        "umbrella/umbrellas parasol/parasols; box/boxes crate/crates; bag/bags; "
        "backpack/backpacks; suitcase/suitcases; basket/baskets; bucket/buckets; bottle/bottles; "
        "ladder/ladders; rope; broom/brooms; camera/cameras; phone/phones cellphone/cellphones; "
        "laptop/laptops; book/books; newspaper/newspapers; candle/candles; clock/clocks; "
        "racket/rackets"
    ),
    "instrument": (
        "guitar/guitars; violin/violins; piano/pianos; drum/drums; trumpet/trumpets; "
        "accordion/accordions; flute/flutes; saxophone/saxophones"
    ),
    "food": (
        "pizza/pizzas; sandwich/sandwiches; hamburger/hamburgers burger/burgers; cake/cakes; "
        "donut/donuts doughnut/doughnuts; banana/bananas; apple/apples; carrot/carrots; "
        "salad/salads; soup/soups; egg/eggs; cookie/cookies"
    ),
    "crockery": (
        "plate/plates; bowl/bowls; cup/cups mug/mugs; fork/forks; spoon/spoons; knife/knives; "
        "pan/pans; vase/vases"
    ),
    "kind": "person/people; animal/animals; vehicle/vehicles; building/buildings; plant/plants",
}

# The same thing may be called by any name of a line here (some only by careless eyes).
_MAY_BE_THE_SAME = (
    "man boy",
    "woman girl",
    "child boy girl baby toddler",
    "bird duck chicken butterfly",
    "cow goat sheep",
    "horse camel",
    "car taxi van truck",
    "motorcycle scooter bicycle tricycle",
    "boat ship canoe kayak",
    "skateboard surfboard scooter",
    "sled wagon",
    "house hut barn tower",
    "tower castle church lighthouse",
    "tree bush plant",
    "flower bush",
    "field meadow park playground",
    "beach desert",
    "street city market",
    "room kitchen bedroom bathroom office garage",
    "restaurant store market kitchen",
    "snow ice",
    "sand mud",
    "pool fountain lake puddle",
    "lake river ocean",
    "jacket sweater vest suit shirt",
    "dress skirt robe costume apron",
    "hat helmet wig",
    "scarf bandanna",
    "table desk",
    "chair stool bench couch",
    "couch bed",
    "bag backpack suitcase basket box",
    "basket bucket",
    "cup bowl plate pan",
    "vase bottle",
    "fork spoon knife",
    "sandwich hamburger",
    "cake cookie donut",
    "soup salad",
    "musician guitarist drummer clown dancer bride",
    "surfer swimmer",
    "skier snowboarder skateboarder",
    "waiter chef",
    "fisherman farmer cowboy",
    "soldier policeman firefighter",
)


# A word for a whole category is true of whatever the category holds.
_COVERS = {
    "person": ("person", "role"),
    "animal": ("animal",),
    "vehicle": ("vehicle",),
    "building": ("building",),
    "plant": ("plant",),
}


@dataclass(frozen=True)
class NounForm:
    """A noun as it stands in a caption: which thing it names, and in which number."""

    thing: str
    category: str
    is_singular: bool
    is_plural: bool


@dataclass(frozen=True)
class Thing:
    """What several names may mean; ``rivals`` are the things that can replace it.

    ``related`` holds all the words, in either number, that would make it true in a picture.
    """

    names: tuple[tuple[str, str], ...]
    rivals: tuple[str, ...]
    related: frozenset[str]

    def name(self, plural: bool) -> str:
        """Its usual name in one number; empty for a plural of what cannot be counted."""
        return self.names[0][plural]


Names = dict[str, tuple[tuple[str, str], ...]]


def _read() -> tuple[Names, dict[str, str]]:
    """The names and the category of each thing."""
    names: Names = {}
    category_of: dict[str, str] = {}
    for category, table in _NOUNS.items():
        for entry in table.split(";"):
            pairs = [name.partition("/") for name in entry.split()]
            thing = pairs[0][0]
            names[thing] = tuple((one, many) for one, _, many in pairs)
            category_of[thing] = category
    return names, category_of


def _things(names: Names, category_of: dict[str, str]) -> dict[str, Thing]:
    same_as = alike(_MAY_BE_THE_SAME)
    things = {}
    for thing, category in category_of.items():
        same = same_as[thing] | {thing}
        rivals = [
            other for other, its in category_of.items() if its == category and other not in same
        ]
        covered = _COVERS.get(thing, ())
        same |= {other for other, its in category_of.items() if its in covered}
        related = {form for other in same for pair in names[other] for form in pair if form}
        things[thing] = Thing(names[thing], tuple(rivals), frozenset(related))
    return things


def _forms(names: Names, category_of: dict[str, str]) -> dict[str, NounForm]:
    forms: dict[str, NounForm] = {}
    for thing, category in category_of.items():
        for one, many in names[thing]:
            forms[one] = NounForm(thing, category, True, one == many)
            if many and many != one:
                forms[many] = NounForm(thing, category, False, True)
    return forms


def alike(lines: tuple[str, ...]) -> defaultdict[str, set[str]]:
    """For each word, all those that share a line with it, and itself."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for line in lines:
        for word in line.split():
            found[word] |= set(line.split())
    return found


THINGS, NOUN_FORMS = _things(*_read()), _forms(*_read())
