"""The words of the two sample documents, as blocks; make_samples.py lays them out."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Heading:
    text: str
    level: int = 2


@dataclass(frozen=True, slots=True)
class Paragraph:
    text: str


@dataclass(frozen=True, slots=True)
class Items:
    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """The first row is the head; widths are shares of the line."""

    rows: tuple[tuple[str, ...], ...]
    widths: tuple[float, ...]


Block = Heading | Paragraph | Items | Table

AGREEMENT: tuple[Block, ...] = (
    Heading("Cold Storage Agreement", level=1),
    Paragraph(
        "This agreement is made between Northgate Cold Storage Ltd (the Keeper) and Meadow Lane "
        "Dairies Ltd (the Depositor). It takes effect on 1 April 2026 and runs for three years, "
        "unless it is ended earlier under section 8."
    ),
    Heading("1. What is stored"),
    Paragraph(
        "The Keeper stores butter, hard cheese and milk powder in chambers 4 to 7 of its depot at "
        "Quayside Road. The Depositor announces each delivery by noon of the day before, with the "
        "number of pallets, the gross weight and the lowest temperature that the goods may reach."
    ),
    Paragraph(
        "Goods of other kinds are taken only after both sides have agreed in writing. Goods that "
        "smell, leak or carry pests may be refused at the dock, and the refusal is noted on the "
        "delivery note with the time and the reason."
    ),
    Heading("2. Duties of the Keeper"),
    Paragraph("For as long as the goods are in its care, the Keeper will"),
    Items(
        (
            "hold each chamber within one degree of the temperature shown in section 4;",
            "record the temperature every ten minutes and keep the records for two years;",
            "tell the Depositor within one hour when a chamber leaves its range for longer than "
            "twenty minutes;",
            "count the pallets at least once a quarter, and after every incident;",
            "let the Depositor inspect the goods on any working day between 08:00 and 16:00.",
        )
    ),
    Heading("3. Duties of the Depositor"),
    Paragraph(
        "The Depositor marks every pallet with a batch number and a date, packs the goods so that "
        "they can be stacked three high, and collects goods that have passed their date within "
        "five working days of being asked. Goods left longer are moved or destroyed at the "
        "Depositor's cost."
    ),
    Heading("4. Chambers and charges"),
    Paragraph(
        "Charges are in pounds sterling, without tax. A pallet that is stored for part of a week "
        "is charged for the whole week."
    ),
    Table(
        (
            ("Chamber", "Temperature", "Pallet places", "Per week", "Handling"),
            ("4 and 5", "2 to 4 °C", "320", "3.85", "2.10"),
            ("6", "-18 °C", "210", "5.40", "2.60"),
            ("7", "-24 °C", "96", "7.15", "2.60"),
            ("Dry store", "12 to 16 °C", "150", "2.20", "1.75"),
        ),
        (0.20, 0.22, 0.22, 0.18, 0.18),
    ),
    Heading("5. Payment"),
    Paragraph(
        "The Keeper sends one invoice a month. It is due thirty days after its date. After that, "
        "interest of four per cent a year above the base rate is added for each day. Charges may "
        "rise once a year, on 1 April, by no more than the consumer price index of the year before."
    ),
    Heading("6. Loss and damage"),
    Paragraph(
        "The Keeper answers for goods that are lost or spoiled while in its care, up to 2,400 "
        "pounds a tonne and 250,000 pounds an incident. It does not answer for loss of profit, nor "
        "for faults that the goods had when they came. A claim is made in writing within "
        "twenty-one days after the goods have left the depot."
    ),
    Heading("7. Insurance"),
    Paragraph(
        "The Keeper insures the building and its own duty of care. The Depositor insures the goods "
        "against fire, flood and theft. Each side shows its policy to the other once a year, "
        "before the last day of March."
    ),
    Heading("8. Ending the agreement"),
    Paragraph(
        "Either side may end this agreement with six months of notice. It may be ended at once"
    ),
    Items(
        (
            "when the other side has not paid for sixty days in spite of two reminders;",
            "when a chamber has been out of range on more than five days of one quarter;",
            "when the other side becomes insolvent or gives up its business.",
        )
    ),
    Heading("9. General"),
    Paragraph(
        "Changes need the written form, this clause included. If one clause is void, the others "
        "stand. The courts at the Keeper's seat decide any dispute, under the law of England and "
        "Wales. Both sides have received one signed copy."
    ),
    Heading("Schedule A: Deliveries and collections", level=1),
    Paragraph(
        "Lorries are served in the order in which they were announced. One that comes more than "
        "thirty minutes late goes to the end of the day's list."
    ),
    Table(
        (
            ("Day", "Deliveries", "Collections", "Dock"),
            ("Monday to Thursday", "06:00 to 14:00", "10:00 to 18:00", "1 to 4"),
            ("Friday", "06:00 to 12:00", "08:00 to 16:00", "1 to 4"),
            ("Saturday", "by arrangement", "07:00 to 11:00", "2"),
            ("Sunday and holidays", "closed", "closed", "none"),
        ),
        (0.31, 0.25, 0.25, 0.19),
    ),
    Paragraph(
        "Outside these hours a call-out charge of 85 pounds applies for each lorry, and twice that "
        "on Sundays and public holidays. Drivers report at the gate house and stay in the marked "
        "area while their lorry is unloaded."
    ),
    Heading("Schedule B: Records", level=1),
    Paragraph(
        "With each monthly invoice the Keeper sends the stock at the end of the month by batch, "
        "the lowest and the highest temperature of each chamber, and a list of all alarms with "
        "their cause and their length."
    ),
)

SCAN: tuple[tuple[Block, ...], ...] = (
    (
        Heading("Northgate Cold Storage Ltd", level=1),
        Paragraph("Quayside Road depot. Report on the incident of 14 September 2026."),
        Heading("Summary"),
        Paragraph(
            "At 03:40 the compressor of chamber 6 stopped after a short break of the mains. The "
            "emergency generator started, but the compressor did not restart by itself, because "
            "its controller was waiting for a manual reset."
        ),
        Paragraph(
            "The night watch saw the alarm at 04:05 and reset the controller at 04:22. The air in "
            "the chamber had risen from 18 to 11 degrees below zero by then. It was back in range "
            "at 06:50. No goods were lost."
        ),
        Paragraph(
            "The Depositor was told by telephone at 04:31 and in writing at 09:15 of the same day. "
            "Forty-two pallets were opened and probed; the warmest of them was at fifteen degrees "
            "below zero."
        ),
    ),
    (
        Heading("Course of the night", level=1),
        Items(
            (
                "03:40 Mains voltage drops for two seconds. Compressor 6 stops.",
                "03:41 Generator takes over. Light and control are back.",
                "03:58 Chamber 6 passes its upper limit. First alarm is sent.",
                "04:05 The night watch confirms the alarm.",
                "04:22 The controller is reset by hand. Compressor 6 runs.",
                "04:31 The Depositor is told by telephone.",
                "06:50 Chamber 6 is within one degree of its set point.",
            )
        ),
        Paragraph(
            "The door of the chamber stayed closed between 03:40 and 06:50. No pallet was moved. "
            "The fans were switched off for the first ten minutes after the reset, so that no warm "
            "air from the coil was blown over the goods."
        ),
    ),
    (
        Heading("Probes of the goods", level=1),
        Paragraph("Core temperature in degrees Celsius, taken between 07:10 and 08:30."),
        Table(
            (
                ("Row", "Pallets", "Goods", "Warmest", "Coldest"),
                ("A", "12", "Butter, salted", "-15.2", "-17.6"),
                ("B", "14", "Butter, unsalted", "-15.0", "-17.1"),
                ("C", "9", "Cheese, grated", "-16.4", "-17.8"),
                ("D", "7", "Butter, salted", "-15.8", "-17.4"),
            ),
            (0.10, 0.16, 0.36, 0.19, 0.19),
        ),
        Paragraph(
            "The limit for release is twelve degrees below zero. All rows were released at 09:00."
        ),
    ),
    (
        Heading("What will be changed", level=1),
        Paragraph(
            "The controller of compressor 6 is set to restart by itself after a break of the "
            "mains, as those of the other chambers are. The maker confirmed the setting on 16 "
            "September."
        ),
        Paragraph(
            "From now on the alarm goes to the telephone of the night watch as well as to the "
            "panel in the gate house. The test of the generator, held every first Monday, now "
            "includes a break of the mains with every compressor under load."
        ),
        Paragraph(
            "The cost of the probes is borne by the Keeper under section 6 of the agreement. This "
            "report closes incident 2026-031."
        ),
    ),
)
